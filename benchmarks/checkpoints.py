"""Cost of a checkpoint for training: our background save against a blocking save.

A DiT trains and saves its weights, moments and average, alternately in the background and blocking. The cost of a save
is the time of all steps until it is on disk, less the time of as many undisturbed steps.

    python benchmarks/checkpoints.py --json benchmarks/results/checkpoints.json
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import Report, device_of, parse, parser, progress, run
from step_networks import XL2, Sizes, Step, our_side
from torch import Tensor

from ddm_lightning.training.checkpoint import (
    CheckpointWriter,
    named_groups,
    tensors_of,
)
from ddm_lightning.training.ema import track_ema

SMALL = Sizes(width=384, depth=12, num_heads=6, patch_size=2, channels=4, edge=16, batch_size=4)
QUICK = Sizes(width=128, depth=4, num_heads=4, patch_size=2, channels=4, edge=16, batch_size=4)
NUM_UNDISTURBED = 10


class Cost(NamedTuple):
    """Seconds that one save takes."""

    still: float
    """During which training pauses."""
    lost: float
    """By which training is delayed in all, the pause included."""
    whole: float
    """Until the checkpoint is on disk."""


class Saved:
    """A network in training, with two ways to save it.

    Args:
        sizes: sizes of the network and its batch.
        device: training device.
        folder: folder of the checkpoints.
    """

    def __init__(self, sizes: Sizes, device: torch.device, folder: Path) -> None:
        on_gpu = device.type == "cuda"
        self.step = Step(our_side(sizes), sizes, device, half=on_gpu, compiled=on_gpu)
        track_ema(self.step.optimizer, 0.9999)
        self.folder = folder
        self.device = device
        self.writer = CheckpointWriter(None, is_rank_zero=True, from_device=on_gpu)
        self.step.seconds(3)

    def tensors(self) -> dict[str, Tensor]:
        """Weights, moments and average by name."""
        return tensors_of(self.step.network, self.step.optimizer)

    @property
    def num_bytes(self) -> int:
        """Bytes of all saved tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def undisturbed(self) -> float:
        """Median seconds of a step without a save."""
        return statistics.median(self.step.seconds(1).wall for _ in range(NUM_UNDISTURBED))

    def in_background(self, step_seconds: float) -> Cost:
        """Save as training does."""
        written: list[float] = []
        path = self.folder / "background"
        shutil.rmtree(path, ignore_errors=True)  # keep only one on disk
        start = time.perf_counter()
        rest = {"groups": named_groups(self.step.network, self.step.optimizer)}
        self.writer.start(path, self.tensors(), rest, lambda: written.append(time.perf_counter() - start))
        still = time.perf_counter() - start
        num_steps = 0
        while not written:
            self.writer.raise_failure()  # such as a full disk
            self.step.take()
            num_steps += 1

        passed = time.perf_counter() - start
        self.writer.wait()
        return Cost(still, passed - num_steps * step_seconds, written[0])

    def waited_for(self) -> Cost:
        """Save one file with ``torch.save``, as Lightning's Trainer does, then sync it to disk."""
        (self.folder / "waited-for").unlink(missing_ok=True)
        start = time.perf_counter()
        state = {"model": self.step.network.state_dict(), "optimizer": self.step.optimizer.state_dict()}
        temporary = self.folder / ".tmp-waited-for"
        with temporary.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())

        temporary.replace(self.folder / "waited-for")
        seconds = time.perf_counter() - start
        return Cost(seconds, seconds, seconds)


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True, device=True), arguments)
    device = device_of(options)
    torch.set_num_threads(1)
    if options.quick:
        sizes = QUICK
    elif device.type == "cuda":
        sizes = XL2
    else:
        sizes = SMALL

    num_turns = 3 if options.quick else 8
    found: dict[str, list[Cost]] = {"background": [], "waited for": []}
    undisturbed = []
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder, progress() as bars:
        saved = Saved(sizes, device, Path(folder))
        for _ in bars.track(range(num_turns + 1), description="turns"):
            undisturbed.append(saved.undisturbed())
            found["background"].append(saved.in_background(undisturbed[-1]))
            found["waited for"].append(saved.waited_for())

        saved.writer.close()

    costs = {way: turns[1:] for way, turns in found.items()}  # the first one warms up
    _report(costs, statistics.median(undisturbed[1:]), saved.num_bytes, sizes).finish(options.json)


def _report(found: dict[str, list[Cost]], step_seconds: float, num_bytes: int, sizes: Sizes) -> Report:
    title = f"Saving {num_bytes / 1e9:.2f} GB of a DiT, {sizes}, {1000 * step_seconds:.0f} ms per step"
    report = Report(title, ["", "training pauses, s", "total delay, s", "on disk after, s"])
    for way, costs in found.items():
        medians = np.median(costs, axis=0).tolist()
        report.row(way, *(f"{value:.3f}" for value in medians))
        for name, value in zip(Cost._fields, medians, strict=True):
            report.figures[f"seconds_{name}_{way.replace(' ', '_')}"] = value

    still, lost, _ = np.median(np.divide(found["background"], found["waited for"]), axis=0).tolist()
    report.figures |= {"still_over_waited_for": still, "lost_over_waited_for": lost, "gigabytes": num_bytes / 1e9}
    report.note(
        f"A background save pauses training for {still:.3f} of the time of a "
        f"blocking save; with slower steps meanwhile, it costs {lost:.3f} of it."
    )
    return report


if __name__ == "__main__":
    run(main)
