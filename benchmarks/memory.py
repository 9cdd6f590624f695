"""Memory, speed and loss with bfloat16 weights, 8-bit moments and averages on the host, over those without.

Bytes and seconds: ``fit`` of 257 million parameters on this CPU, over the code before these settings, in turn, without
averages on the host and their input. Losses: held out, of experts at a quarter of the budget, over those in float32;
they take hours. The same command goes on after an interruption, and ``--quick`` leaves them out.

    python benchmarks/memory.py --json benchmarks/results/memory.json
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import MEMBER, REPOSITORY, TINY, Child, Report, call, load, parse, parser, run
from flop_training import ENSEMBLE, Study, Variant
from start import cpu_seconds
from step_loops import our_trainer

from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus

BEFORE = "fd829a81"
SETTINGS = ("expert.train.optimizer=adamw-8bit", "island.precision=bf16-true", "island.ema=host")
NETWORK = "expert.network={name: dit, params: {width: 768, depth: 24, num_heads: 12, patch_size: 2}}"
TRAIN = "expert.train.max_steps={}"
STEPS = 6
HEAPS = {"": ("MALLOC_MMAP_THRESHOLD_=4194304",), "_default_heap": ()}
"""Settings of glibc: one with which its heap keeps no large tensors that are freed, and its own."""


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", config=str(REPOSITORY / "experiments" / "mix_4x.yaml")), arguments)
    report = Report("Training in less memory, over a plain one", ["", "ratio", "lowest", "highest"])
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        subprocess.run(f"git archive {BEFORE} | tar -x -C {folder}", shell=True, check=True, cwd=REPOSITORY)
        tiny = Namespace(config=str(TINY), overrides=[f"run_dir={folder}/run", "island.accelerator=cpu"])
        call("prepare", tiny)
        held, num_parameters = held_in_training(tiny)
        found = {"bytes_per_parameter": np.array([held / num_parameters])}
        for suffix, heap in HEAPS.items():
            rounds = []
            for _ in range(1 if options.quick else 3):
                now = fit(REPOSITORY, tiny, heap, *SETTINGS)
                now[0] -= 6 * num_parameters  # averages in float32, and weights on their way to them
                rounds.append(now / fit(Path(folder), tiny, heap))

            for name, each in zip(("device_bytes_over_today", "step_over_today"), np.transpose(rounds), strict=True):
                found[name + suffix] = each

    if not options.quick:
        found |= losses(options)

    for name, each in found.items():
        report.figures[name] = float(np.median(each))
        report.row(name, *map("{:.3f}".format, (np.median(each), each.min(), each.max())))

    report.finish(options.json)


def fit(code: Path, options: Namespace, heap: Sequence[str], *settings: str) -> np.ndarray:
    """Most resident bytes and CPU seconds that a large network takes in ``fit`` of the code in a folder."""
    found = []
    place = RunFolder.of(load(options))
    before = ("env", "-C", str(code), *heap)
    for own in ((), (NETWORK, *settings)):
        shutil.rmtree(place.root / "members", ignore_errors=True)
        (place.root / "experiment.yaml").unlink(missing_ok=True)
        words = [*options.overrides, *own, f"member={MEMBER}", "island.log_every_n_steps=1", TRAIN.format(10**6)]
        member = Child("ddm_lightning", "fit", "-c", options.config, *words, before=before)
        while member.poll() is None and MemberStatus.read(place.member(MEMBER), MEMBER, 0).step < STEPS:
            time.sleep(0.005)

        status = Path(f"/proc/{member.pid}/status").read_text(encoding="utf-8")
        found.append([1024 * float(status.partition("VmHWM:")[2].split()[0]), cpu_seconds(member.pid)])
        member.kill()
        member.wait()

    return np.diff(found, axis=0)[0]


def held_in_training(options: Namespace) -> tuple[int, int]:
    """Bytes of weights, gradients and moments of a training with all settings, and its parameters."""
    trainer, module, data = our_trainer(load(options, NETWORK, *SETTINGS, TRAIN.format(2)))
    trainer.fit(module, datamodule=data)
    tensors: list[Any] = 2 * [*module.parameters()]  # a gradient has the dtype of its weight
    for state in trainer.optimizers[0].state.values():
        tensors += [value for key, value in state.items() if key != "ema"]

    return sum(tensor.nbytes for tensor in tensors), sum(parameter.numel() for parameter in module.parameters())


def losses(options: Namespace) -> dict[str, np.ndarray]:
    """Train with each setting and with all, three seeds each; return losses over those in float32."""
    kinds = {one.rpartition("=")[2]: (one,) for one in SETTINGS} | {"all": SETTINGS}
    variants = [Variant(name, settings, ENSEMBLE, [0.25]) for name, settings in kinds.items()]
    study = Study(options, [Variant("main", (), ENSEMBLE, [0.25], range(3)), *variants])
    study.prepare()
    study.train(2)
    found = [study.losses(*point, ENSEMBLE)["held_out_loss"] for point in study.points()]
    plain, *others = np.reshape(found, (-1, 3))
    names = [f"loss_over_float32_{name}".removesuffix("_all") for name in kinds]
    return {name: each / plain for name, each in zip(names, others, strict=True)}


if __name__ == "__main__":
    run(main)
