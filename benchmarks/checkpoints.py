"""What a checkpoint costs the training that it is taken of: ours in the background beside one that is waited for.

Steps of a DiT go on; at every turn its weights, moments and average are saved, by each way in turn. What a save costs
is the time of all steps from its beginning until it is on the disk, less that of as many steps undisturbed.

    python benchmarks/checkpoints.py --json benchmarks/results/checkpoints.json
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Report, console, parse, progress, run

from ddm_lightning.core.compat import ensure_torchvision_importable

ensure_torchvision_importable()

import step_gpu  # noqa: E402  # after torchvision has been made importable
from step_networks import Sizes, Step, our_side  # noqa: E402

from ddm_lightning.training.checkpoint.files import (  # noqa: E402
    CheckpointWriter,
    named_groups,
    tensors_of,
)
from ddm_lightning.training.ema import track_ema  # noqa: E402

SMALL = Sizes(width=384, depth=12, num_heads=6, patch_size=2, channels=4, edge=16, batch_size=4)
QUICK = Sizes(width=128, depth=4, num_heads=4, patch_size=2, channels=4, edge=16, batch_size=4)
NUM_UNDISTURBED = 10


@dataclass(frozen=True)
class Cost:
    """Of one save."""

    still: float
    """Seconds in which no step was taken."""
    lost: float
    """Seconds that steps took longer than undisturbed, with those of ``still``."""
    whole: float
    """Seconds until it was on the disk."""


class Saved:
    """A network that is trained and saved now and then.

    Args:
        sizes: of the network and its batch.
        device: where it trains.
        folder: where it is saved.
    """

    def __init__(self, sizes: Sizes, device: torch.device, folder: Path) -> None:
        on_gpu = device.type == "cuda"
        self.step = Step(our_side(sizes), sizes, device, half=on_gpu, compiled=on_gpu)
        track_ema(self.step.optimizer, 0.9999)
        self.folder, self.device = folder, device
        self.writer = CheckpointWriter(None, leads=True, from_device=on_gpu)
        self.step.seconds(3)

    @property
    def num_bytes(self) -> int:
        """Of all tensors that are saved."""
        return sum(value.nbytes for value in tensors_of(self.step.side.network, self.step.optimizer).values())

    def undisturbed(self) -> float:
        """Seconds of one step."""
        return statistics.median(self.step.seconds(1).wall for _ in range(NUM_UNDISTURBED))

    def in_background(self, step_seconds: float) -> Cost:
        """As training does it."""
        written: list[float] = []
        path = self.folder / "background"
        shutil.rmtree(path, ignore_errors=True)  # the disk holds one of each way, not two
        start = time.perf_counter()
        network, optimizer = self.step.side.network, self.step.optimizer
        rest = {"groups": named_groups(network, optimizer)}
        self.writer.start(
            path, tensors_of(network, optimizer), rest, lambda: written.append(time.perf_counter() - start)
        )
        still, num_steps = time.perf_counter() - start, 0
        while not written:
            self.writer.raise_failure()  # of a full disk, for one
            self.step.seconds(1)
            num_steps += 1
        passed = time.perf_counter() - start
        self.writer.wait()
        return Cost(still, passed - num_steps * step_seconds, written[0])

    def waited_for(self) -> Cost:
        """One file by ``torch.save``, flushed and renamed: what Lightning's Trainer does, and the flush."""
        (self.folder / "waited-for").unlink(missing_ok=True)
        start = time.perf_counter()
        state = {"model": self.step.side.network.state_dict(), "optimizer": self.step.optimizer.state_dict()}
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
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", metavar="OUT", type=Path, help="write commit, device, command and figures here")
    made.add_argument("--quick", action="store_true", help="some seconds; a network that is saved in no time")
    made.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda where there is one")
    made.set_defaults(overrides=[])
    options = parse(made, arguments)
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    sizes = QUICK if options.quick else step_gpu.XL2 if name == "cuda" else SMALL
    shown = console()
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder, progress(shown) as bars:
        saved = Saved(sizes, torch.device(name), Path(folder))
        num_turns = 3 if options.quick else 8
        found: dict[str, list[Cost]] = {"background": [], "waited for": []}
        undisturbed = []
        for number in bars.track(range(num_turns + 1), description="turns"):
            step_seconds = saved.undisturbed()
            costs = saved.in_background(step_seconds), saved.waited_for()
            if number:  # the first one makes room
                undisturbed.append(step_seconds)
                for costs_of, cost in zip(found.values(), costs, strict=True):
                    costs_of.append(cost)
        report = _report(found, statistics.median(undisturbed), saved.num_bytes, sizes)
        saved.writer.close()
    report.show(shown)
    report.write(options.json)


def _report(found: dict[str, list[Cost]], step_seconds: float, num_bytes: int, sizes: Sizes) -> Report:
    title = f"Saving {num_bytes / 1e9:.2f} GB of a DiT, {sizes}, {1000 * step_seconds:.0f} ms a step"
    report = Report(title, ["", "training stands still, s", "costs it in all, s", "is on the disk after, s"])
    for way, costs in found.items():
        middle = [
            statistics.median(values) for values in zip(*((c.still, c.lost, c.whole) for c in costs), strict=True)
        ]
        report.row(way, *(f"{value:.3f}" for value in middle))
        for name, value in zip(("still", "lost", "whole"), middle, strict=True):
            report.figures[f"seconds_{name}_{way.replace(' ', '_')}"] = value
    pairs = list(zip(*found.values(), strict=True))
    report.figures |= {
        "still_over_waited_for": statistics.median(ours.still / theirs.still for ours, theirs in pairs),
        "lost_over_waited_for": statistics.median(ours.lost / theirs.lost for ours, theirs in pairs),
        "gigabytes": num_bytes / 1e9,
    }
    report.note(
        f"In the background training stands still for {report.figures['still_over_waited_for']:.3f} of the time of a "
        f"save that is waited for; with what its steps lose meanwhile, {report.figures['lost_over_waited_for']:.3f}."
    )
    return report


if __name__ == "__main__":
    sys.exit(run(main))
