"""Steps of ``smoke_gpu.py`` that run the command line in child processes, as users do; and what every step uses."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import ACCELERATORS, LOGS_SAMPLES, MEMBER, REPOSITORY, TINY, Child

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.use.ensemble import DecentralizedEnsemble

SIZES = ("width: 64, depth: 2, num_heads: 2", "width: 384, depth: 12, num_heads: 12")
"""Of the network, small and large."""
MAX_STEPS = 120
STOP_AT = 30
RANDOM = 0.08
"""Tolerance of a held-out loss under other random numbers; on a CPU its standard deviation is 0.02."""
ROUNDED = 0.003
"""Tolerance under other rounding; on a CPU it takes 0.0005."""
WHOLE = (
    "prepare.partition.num_clusters=3",
    "expert.train.global_batch_size=24",
    "expert.train.ema_widths=[0.05, 0.1]",
    LOGS_SAMPLES,
    "evaluate.num_images=64",
)
"""Settings of the ensemble of step 9."""
METRIC = "evaluate.metrics=[{name: kid, params: {features: pooled-pixels}}]"


class Check(NamedTuple):
    """One thing that a step looked at."""

    what: str
    expected: str
    """Empty for a fact that is only shown."""
    found: str
    ok: bool = True
    figure: float | None = None
    """``found`` as a number, for ``--json``."""


def shown(what: str, found: object, figure: float | None = None) -> Check:
    """Show a fact that nothing is expected of."""
    return Check(what, "", str(found), True, figure)


def same(what: str, found: object, expected: object = True) -> Check:
    """Expect equality."""
    return Check(what, str(expected), str(found), found == expected)


def near(what: str, found: float, expected: float, tolerance: float) -> Check:
    """Expect a number that differs by at most the share ``tolerance``."""
    is_near = abs(found - expected) <= tolerance * abs(expected)
    return Check(what, f"{expected:.5g} ± {tolerance:.1%}", f"{found:.5g}", is_near, found)


def at_most(what: str, found: float, limit: float) -> Check:
    """Expect a number up to ``limit``; infinity shows it without an expectation."""
    expected = "" if limit == float("inf") else f"at most {limit:.4g}"
    return Check(what, expected, f"{found:.4g}", found <= limit, found)


class Watched(Child):
    """A child process that is looked at while it runs."""

    seconds = 300.0

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Return once ``is_there``, which may fail until its files appear.

        Raises:
            RuntimeError: the process ended before.
        """
        while self.poll() is None:
            with suppress(OSError, ValueError, LookupError):
                if is_there():
                    return

            time.sleep(0.01)

        raise RuntimeError(f"ended too early: {self.ended()}")


@dataclass(frozen=True)
class Place:
    """Where the steps run, and how large."""

    folder: Path
    """Receives the runs."""
    device: torch.device
    quick: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether the real sizes run; on a CPU all are small."""
        return self.device.type == "cuda"

    @property
    def is_large(self) -> bool:
        """Whether networks are large, and commands compile."""
        return self.on_gpu and not self.quick

    @property
    def island(self) -> list[str]:
        """Settings of the island."""
        settings = [f"island.compile={str(self.is_large).lower()}", "island.precision=bf16-mixed"]
        return [*settings, f"island.accelerator={ACCELERATORS[self.device.type]}"]

    def start(self, command: str, run: str, *more: str) -> Watched:
        """Start a command on a run, which has the folder's shards if there are any."""
        folder = self.folder / run
        prepared = self.folder / "prepared"
        folder.mkdir(parents=True, exist_ok=True)
        if prepared.exists() and not (folder / "prepared").exists():
            (folder / "prepared").symlink_to(prepared)

        return Watched("ddm_lightning", command, "-c", str(TINY), f"run_dir={folder}", *more)

    def fit(self, run: str, *more: str) -> Watched:
        """Start to train the first expert of two; the first call of all prepares."""
        network = f"{{{SIZES[self.is_large]}, patch_size: 4, qk_norm: true}}"
        settings = [
            "prepare.source.params={num_samples: 600, image_size: 16}",
            f"expert.network={{name: dit, params: {network}}}",
            f"expert.train.max_steps={MAX_STEPS}",
            "expert.train.global_batch_size=32",
            "expert.train.learning_rate=1e-3",
            "island.log_every_n_steps=5",
            "island.checkpoint_every_n_steps=10",
            "island.validate_every_n_steps=40",
            LOGS_SAMPLES,
            *self.island,
        ]
        if not (self.folder / "prepared").exists():
            self.start("prepare", "shards", *settings).ended()
            (self.folder / "prepared").symlink_to(self.folder / "shards" / "prepared")

        return self.start("fit", run, *settings, f"member={MEMBER}", *more)

    def member(self, run: str, name: str = MEMBER) -> Path:
        """Folder of a member."""
        return self.folder / run / "members" / name

    def status(self, run: str, name: str = MEMBER) -> MemberStatus:
        """Status of a member."""
        return MemberStatus.read(self.member(run, name), name, 0)

    def held_out(self, run: str) -> float:
        """Held-out loss of the first expert."""
        return float(self.status(run).metrics["held_out/loss"])

    def sample_ids(self, run: str) -> dict[int, set[int]]:
        """Step -> ids of its samples on all ranks; a repeated step counts once."""
        found: dict[int, set[int]] = {}
        for path in self.member(run).glob("sample_ids*.txt"):
            for line in path.read_text(encoding="utf-8").splitlines():
                step, _, ids = line.partition(":")
                found.setdefault(int(step), set()).update(map(int, ids.split()))

        return found


def tests(place: Place) -> Iterator[Check]:
    """Run the tests that need a GPU; without one, only find them."""
    words = ["-q", "-m", "gpu", str(REPOSITORY / "tests")]
    if not place.on_gpu:
        words.append("--collect-only")

    last = Watched("pytest", *words).ended().splitlines()[-1]
    yield Check("pytest -m gpu", "passed", last, re.match(r"\d+(/\d+ tests collected| passed)", last) is not None)


def training(place: Place) -> Iterator[Check]:
    """Train with four threads that load, validations, previews and checkpoints; compare with the CPU."""
    on_cpu = ("island.accelerator=cpu", "island.precision=32-true", "island.compile=false", "island.num_threads=8")
    reference = place.fit("cpu", *on_cpu, "island.checkpoint_every_n_steps=1000")
    place.fit("fit", "island.num_workers=4").ended()
    reference.ended()
    yield near("held-out loss, against the CPU's", place.held_out("fit"), place.held_out("cpu"), RANDOM)


def stop_and_resume(place: Place) -> Iterator[Check]:
    """Stop a training by SIGTERM, resume it, and compare it with one that ran through."""
    yield from _resumed(place, "stopped", "island.num_workers=4")


def strategies(place: Place) -> Iterator[Check]:
    """Stop and resume under each strategy of several devices with one, in micro batches."""
    for name in ("ddp", "fsdp", "fsdp-shard-grad-op"):
        yield from _resumed(place, name, f"island.strategy={name}", "island.micro_batch_size=8")


def _resumed(place: Place, name: str, *more: str) -> Iterator[Check]:
    place.fit("fit").ended()  # does nothing after the first time
    child = place.fit(name, *more)
    child.wait_until(lambda: place.status(name).step >= STOP_AT)
    child.send_signal(signal.SIGTERM)
    child.ended(code=130)
    words = f"resumes at step {place.status(name).step}"
    output = place.fit(name, *more).ended()
    yield same(f"{name}: exit code 130, then {words}", words in output)
    yield same(f"{name}: the same samples in each step", place.sample_ids(name) == place.sample_ids("fit"))
    yield near(f"{name}: held-out loss, against no stop", place.held_out(name), place.held_out("fit"), ROUNDED)


def ensemble(place: Place) -> Iterator[Check]:
    """Train an ensemble, a monolith and a student; sample in every way, evaluate, compare averages."""
    whole = replace(place, folder=place.folder / "whole")  # shards of its own
    whole.start("fit", "run", *WHOLE, *place.island, "--jobs", "4").ended()
    for name in ("monolith", "student"):
        whole.start("fit", "run", *WHOLE, *place.island, f"member={name}").ended()
        yield same(name, whole.status("run", name).state, "done")

    yield from images(whole)
    yield same("evaluate", "results:" in whole.start("evaluate", "run", METRIC).ended())
    output = whole.start("ema", "run", f"member={MEMBER}", "--width", "0.08").ended()
    yield same("ema", "next:" in output)


def images(place: Place) -> Iterator[Check]:
    """Sample with every strategy and in further ways; compare with the CPU's images."""
    run = place.folder / "run"
    device = str(place.device)
    on_cpu = DecentralizedEnsemble.from_pretrained(run, "cpu")
    here = DecentralizedEnsemble.from_pretrained(run, device)
    few = DecentralizedEnsemble.from_pretrained(run, device, resident_experts=2)
    full = {"strategy": "full"}
    yield _compared(few, on_cpu, full)
    yield _compared(here, on_cpu, full | {"compile": place.is_large})
    yield _compared(here, on_cpu, full | {"precision": "auto"}, limit=0.03)
    for way in ("expert", "mixture"):
        yield _compared(here, on_cpu, {"guidance_scale": 3.0, "guidance": way})

    for name in STRATEGIES.names():
        if name != "oracle":
            yield _compared(here, on_cpu, {"strategy": name})


def _compared(
    ensemble: DecentralizedEnsemble, reference: DecentralizedEnsemble, settings: Mapping[str, Any], limit: float = 0.01
) -> Check:
    difference = _pixels(ensemble, settings) - _pixels(reference, settings)
    what = f"{settings}, {ensemble.about.sample.resident_experts or 'all'} experts resident"
    # Rounding may flip the choice of an expert for a few of them.
    return at_most(f"{what}: median difference of images", float(np.median(abs(difference).mean(1))), limit)


def _pixels(ensemble: DecentralizedEnsemble, settings: Mapping[str, Any]) -> np.ndarray:
    prompts = ["red disc", "blue square"] * 4
    images = ensemble(prompts, seed=0, output_type="np", **{"precision": "32-true", **settings}).images
    return np.reshape(images, (len(prompts), -1))


def options(place: Place) -> Iterator[Check]:
    """Train twelve steps with settings that no other step has."""
    for setting in ("expert.train.optimizer=muon", "island.precision=16-mixed", "island.activation_checkpointing=true"):
        place.fit(setting, "expert.train.max_steps=12", setting).ended()
        yield at_most(f"{setting}: held-out loss", place.held_out(setting), 3)


def two_devices(place: Place) -> Iterator[Check]:
    """Train on two devices: DDP, FSDP2, a killed rank; evaluate under torchrun."""
    place.fit("fit").ended()
    for name in ("ddp", "fsdp"):
        place.fit(f"{name}-2", "island.devices=2", f"island.strategy={name}").ended()
        is_same = place.sample_ids(f"{name}-2") == place.sample_ids("fit")
        yield same(f"{name}: the samples of one device in each step", is_same)

    key = "train/gradient_norm"
    ddp = place.status("ddp-2").metrics[key]
    yield near("gradient norm of FSDP2, against DDP's", place.status("fsdp-2").metrics[key], ddp, 0.01)
    child = place.fit("killed", "island.devices=2", "island.strategy=ddp")
    child.wait_until(lambda: place.status("killed").step >= STOP_AT)
    start = time.monotonic()
    os.kill(child.children()[-1], signal.SIGKILL)
    child.wait(60)
    child.output()
    yield at_most("end after a killed rank, s", time.monotonic() - start, 30)
    whole = replace(place, folder=place.folder / "whole")
    if whole.folder.exists():  # step 9 makes it
        words = ["--nproc-per-node=2", "-m", "ddm_lightning", "evaluate", METRIC, "-c"]
        output = Watched("torch.distributed.run", *words, str(whole.folder / "run/experiment.yaml")).ended()
        yield same("evaluate under torchrun", "results:" in output)
