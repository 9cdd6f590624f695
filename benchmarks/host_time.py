"""Host time of one optimizer step of 28 small compiled blocks, unsharded and sharded over eight ranks.

The process group is fake: this process is the first of eight ranks, and collectives return at once. The blocks are so
small that the host takes nearly all of the time. The variants alternate in one process, a few steps each. Times are CPU
times, which other processes hardly disturb.

    python benchmarks/host_time.py --before ../checkout-of-another-commit --json benchmarks/results/host_time.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from common import Report, console, parse, run
from step_networks import NUM_CLASSES, Side, Sizes, forget_compiled, our_side
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.networks.compiled import compile_blocks
from ddm_lightning.training.ema import track_ema
from ddm_lightning.training.optimizer import build_optimizer, clip_in_step
from ddm_lightning.training.parallel.strategy import shard_blocks

NUM_RANKS, STEPS_PER_TURN = 8, 5
SIZES = Sizes(width=32, depth=28, num_heads=2, patch_size=2, channels=4, edge=4, batch_size=1)
TITLES = {"unsharded": "unsharded", "fsdp2": "FSDP2", "gathered": "FSDP2, weights gathered until the backward pass"}
EMA_BAR_MS = 2.0


class HostStep:
    """Training step with clipping, fused AdamW and EMA; records the milliseconds of each step and of its EMA."""

    def __init__(self, side: Side) -> None:
        self.side = side
        compile_blocks(side.network)
        self.optimizer = build_optimizer(side.network, TrainConfig(1, SIZES.batch_size))
        self.marks: list[float] = []
        self.optimizer.register_step_post_hook(lambda *_: self.marks.append(time.process_time()))
        track_ema(self.optimizer, 0.9999)
        self.optimizer.register_step_post_hook(lambda *_: self.marks.append(time.process_time()))
        generator = torch.Generator().manual_seed(0)
        self.x_t = torch.randn((SIZES.batch_size, *SIZES.x_shape), generator=generator)
        self.t = torch.rand(SIZES.batch_size, generator=generator)
        self.classes = torch.randint(NUM_CLASSES, (SIZES.batch_size,), generator=generator)
        self.parameters = list(side.network.parameters())
        self.found: list[tuple[float, float]] = []

    def take(self) -> None:
        """Take one step."""
        start = time.process_time()
        self.side.predict(self.x_t, self.t, self.classes).square().mean().backward()
        clip_in_step(self.optimizer, self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.process_time()
        before, after = self.marks[-2:]
        self.found.append((1e3 * (end - start), 1e3 * (after - before)))


def measure(num_rounds: int) -> dict[str, float]:
    """Measure median milliseconds of a step and of its EMA; ``_low`` and ``_high`` are quartiles of the step."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))

    def sharded(network: nn.Module, *, gathered: bool) -> nn.Module:
        shard_blocks(network, mesh, gathered=gathered)
        return network

    forget_compiled()
    wraps = {"unsharded": None, "fsdp2": partial(sharded, gathered=False), "gathered": partial(sharded, gathered=True)}
    steps = {name: HostStep(our_side(SIZES, wrap=wrap)) for name, wrap in wraps.items()}
    for number in range(num_rounds + 1):
        for step in steps.values():
            for _ in range(STEPS_PER_TURN):
                step.take()
            if number == 0:
                step.found.clear()  # the first round compiles
    dist.destroy_process_group()
    figures: dict[str, float] = {}
    for name, step in steps.items():
        whole, ema = zip(*step.found, strict=True)
        low, middle, high = statistics.quantiles(whole, n=4)
        figures |= {f"{name}_ms": middle, f"{name}_ms_low": low, f"{name}_ms_high": high}
        figures[f"{name}_ema_ms"] = statistics.median(ema)
    return figures


def measure_other(folder: Path, *, quick: bool) -> dict[str, float]:
    """Run ``measure`` with the package of another checkout, in a process of its own.

    Raises:
        UserError: the process failed; it has printed the reason.
    """
    if not (folder / "ddm_lightning").is_dir():
        raise UserError(f"--before {folder}: give a checkout of this repository")
    with tempfile.TemporaryDirectory(prefix="host-time-") as place:
        out = Path(place) / "before.json"
        arguments = [sys.executable, __file__, "--json", str(out), *(["--quick"] if quick else [])]
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
        done = subprocess.run(arguments, env=environment, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise UserError(f"--before {folder}: ended with code {done.returncode}; see above")
        figures: dict[str, float] = json.loads(out.read_text())["figures"]
        return figures


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--json", metavar="OUT", type=Path, help="write commit, device, command and figures here")
    cli.add_argument("--quick", action="store_true", help="a minute; the same figures with less certainty")
    cli.add_argument("--before", metavar="FOLDER", type=Path, help="a checkout of another commit to measure first")
    cli.set_defaults(overrides=[])
    options = parse(cli, arguments)
    torch.set_num_threads(1)
    before = {} if options.before is None else measure_other(options.before, quick=options.quick)
    figures = measure(3 if options.quick else 20)
    headings = ["host time, ms", *(["per step, before", "of it EMA, before"] if before else [])]
    report = Report("One step of 28 small compiled blocks, one thread", [*headings, "per step", "of it EMA"])
    for name, title in TITLES.items():
        cells = [f"{some[f'{name}{end}']:.2f}" for some in (before, figures) if some for end in ("_ms", "_ema_ms")]
        report.row(title, *cells)
        is_met = "met" if figures[f"{name}_ema_ms"] < EMA_BAR_MS else "not met"
        report.note(f"{name}_ema_ms {figures[f'{name}_ema_ms']:.2f}, bar {EMA_BAR_MS:g}: {is_met}.")
    report.figures = figures | {f"{name}_before": value for name, value in before.items()}
    report.show(console())
    report.write(options.json)


if __name__ == "__main__":
    sys.exit(run(main))
