"""Stop a training at random moments: are its final weights the same, and how much time is lost?

One expert trains undisturbed, then once more while its process is stopped by SIGKILL, by SIGTERM, and by a full disk (a
tmpfs, if mounting one is allowed). After each stop, every checkpoint is read.

    python benchmarks/kills.py --json benchmarks/results/kills.json
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import LOGS_SAMPLES, MEMBER, Child, Report, console, load, parse, parser, progress, run, start
from rich.progress import Progress, TaskID

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.training.checkpoint import damage_of

KILL = "SIGKILL"
TERMINATE = "SIGTERM"
FULL_DISK = "full disk"
NUM_KILLS, MAX_STEPS = 20, 8000
QUICK_KILLS, QUICK_STEPS = 3, 1500
_DISK_MEGABYTES = 64
_MOST_SECONDS = 300.0
_WAIT_SECONDS = 0.02


@dataclass(frozen=True)
class Stop:
    """One planned stop of the training."""

    kind: str
    """``KILL``, ``TERMINATE`` or ``FULL_DISK``."""
    at_step: int | None
    """Step after which to stop; None to stop while the process starts."""
    delay: float
    """Further seconds to wait, so that the stop may hit any operation."""


def random_stops(num: int, max_steps: int, kinds: Sequence[str], seed: int) -> list[Stop]:
    """Plan random stops in order of their steps: each kind at least once, a tenth of them during start-up."""
    generator = random.Random(seed)
    chosen = [*kinds, *generator.choices(kinds, k=max(0, num - len(kinds)))][:num]
    generator.shuffle(chosen)
    steps = sorted(generator.sample(range(1, int(0.95 * max_steps)), num))
    found = []
    for number, (kind, step) in enumerate(zip(chosen, steps, strict=True)):
        starting = number % 10 == 9
        if starting:
            kind = KILL
        found.append(Stop(kind, None if starting else step, generator.uniform(0, 6.0 if starting else 0.3)))
    return found


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", config="experiments/tiny_2x.yaml")
    cli.add_argument("--kills", type=int, default=None, help="number of stops (default: 20; with --quick: 3)")
    options = parse(cli, arguments)
    num_kills = options.kills if options.kills is not None else QUICK_KILLS if options.quick else NUM_KILLS
    max_steps = QUICK_STEPS if options.quick else MAX_STEPS
    if not 1 <= num_kills <= max_steps // 10:
        raise UserError(f"--kills {num_kills}: must be from 1 to {max_steps // 10}, a tenth of the steps")
    options.overrides += [
        f"expert.train.max_steps={max_steps}",
        "island.log_every_n_steps=25",
        "island.checkpoint_every_n_steps=50",
        f"island.validate_every_n_steps={max_steps}",
        LOGS_SAMPLES,
        # Writes snapshots between checkpoints, where the disk may be full, too.
        "expert.train.ema_widths=[0.1]",
    ]
    shown = console()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, progress(shown) as bars:
        task = bars.add_task("undisturbed", total=max_steps)
        reference = Trainings(options, Path(folder) / "reference")
        reference.prepare()
        seconds = reference.train(None, bars, task)
        task = bars.add_task("disturbed", total=max_steps)
        with small_disk(Path(folder) / "disk") as can_fill:
            kinds = [KILL, TERMINATE, *([FULL_DISK] if can_fill else [])]
            disturbed = Trainings(options, Path(folder) / "disk" / "run")
            disturbed.prepare()
            runs = [disturbed.train(stop, bars, task) for stop in random_stops(num_kills, max_steps, kinds, seed=0)]
            runs.append(disturbed.train(None, bars, task))
            report = _report(reference, disturbed, seconds, runs, max_steps)
            if not can_fill:
                report.note("A tmpfs cannot be mounted here, so full disks were not tested.")
    report.show(shown)
    report.write(options.json)


class Trainings:
    """One run folder, in which successive processes train one member."""

    def __init__(self, options: Namespace, folder: Path) -> None:
        self.options = options
        self.run_dir = f"run_dir={folder}"
        self.run = RunFolder(folder)
        self.num_unreadable = self.num_checkpoints_read = 0
        self.ends: Counter[str] = Counter()

    def prepare(self) -> None:
        """Write the shards."""
        prepare(load(self.options, self.run_dir), self.run.root)

    def train(self, stop: Stop | None, bars: Progress, task: TaskID) -> float:
        """Train until ``stop``, or to the last step; return seconds of wall-clock time.

        Raises:
            UserError: the process ended in another way than planned.
        """
        began = time.monotonic()
        process = start("fit", self.options, self.run_dir, f"member={MEMBER}")
        filler = self.run.root.parent / "filler"
        try:
            if stop is not None:
                self._await(stop, process, bars, task)
                if process.poll() is None:
                    if stop.kind == FULL_DISK:
                        fill(filler)
                    else:
                        process.send_signal(signal.SIGKILL if stop.kind == KILL else signal.SIGTERM)
            while process.poll() is None and time.monotonic() < began + _MOST_SECONDS:
                time.sleep(_WAIT_SECONDS)
                bars.update(task, completed=self._step())
        finally:
            process.kill()
            filler.unlink(missing_ok=True)
        process.wait()
        seconds, output = time.monotonic() - began, process.output()
        reason = _reason(process.returncode, output)
        if stop is None and reason != "done":
            raise UserError(f"{self.run.root}: the training did not reach its last step: {output}")
        self.ends[reason] += 1
        self._read_checkpoints()
        return seconds

    def _await(self, stop: Stop, process: Child, bars: Progress, task: TaskID) -> None:
        while stop.at_step is not None and process.poll() is None:
            status = self._status()
            if status.state == "training" and status.step >= stop.at_step:
                break
            bars.update(task, completed=status.step)
            time.sleep(_WAIT_SECONDS)
        time.sleep(stop.delay)

    def _status(self) -> MemberStatus:
        return MemberStatus.read(self.run.member(MEMBER), MEMBER, 0)

    def _step(self) -> int:
        return self._status().step

    def _read_checkpoints(self) -> None:
        for path in (self.run.member(MEMBER) / "checkpoints").glob("step-*.ckpt"):
            self.num_checkpoints_read += 1
            self.num_unreadable += damage_of(path) is not None

    def steps_taken(self) -> int:
        """Number of steps taken by all processes, repeated steps included."""
        return len((self.run.member(MEMBER) / "sample_ids.txt").read_text(encoding="utf-8").splitlines())


def hashes(trainings: Trainings, name: str) -> dict[str, str]:
    """SHA-256 of each weights file in the member's folder ``name``."""
    folder = trainings.run.member(MEMBER) / name
    return {path.name: sha256_file(path) for path in folder.glob("*.safetensors")}


def _reason(code: int, errors: str) -> str:
    """Why a training process ended, from its exit code and stderr."""
    if code == 2 and "is full; free some space" in errors:
        return FULL_DISK
    known = {0: "done", -signal.SIGKILL: KILL, 130: TERMINATE, -signal.SIGTERM: TERMINATE}
    if code not in known:
        raise UserError(f"the training ended with code {code}: {errors[-2000:]}")
    return known[code]


def fill(path: Path) -> None:
    """Write ``path`` until its disk is full."""
    with path.open("wb", buffering=0) as stream:
        size = 1 << 20
        while size:
            try:
                stream.write(bytes(size))
            except OSError:
                size //= 2


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small tmpfs on ``folder`` within the block; yield whether that worked."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MEGABYTES}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(["mount", *options], capture_output=True, timeout=20, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


def _report(
    reference: Trainings, disturbed: Trainings, seconds: float, runs: Sequence[float], max_steps: int
) -> Report:
    taken, total = disturbed.steps_taken(), sum(runs)
    weights, averages = ([hashes(one, name) for one in (reference, disturbed)] for name in ("artifact", "ema"))
    report = Report(f"{max_steps:,} steps, stopped {len(runs) - 1} times", ["end", "times"])
    for reason, times in sorted(disturbed.ends.items()):
        report.row(reason, str(times))
    report.figures |= {
        "num_stops": len(runs) - 1,
        "same_weights": float(weights[0] == weights[1]),
        "same_averages": float(averages[0] == averages[1]),
        "unreadable_checkpoints": disturbed.num_unreadable,
        "checkpoints_read": disturbed.num_checkpoints_read,
        "goodput_steps": max_steps / taken,
        "goodput_time": seconds / total,
        "seconds_undisturbed": seconds,
        "seconds_disturbed": total,
    }
    for name, (wanted, found) in (("weights", weights), (f"{len(averages[0])} snapshots of an average", averages)):
        report.note(f"Same {name}, bit for bit: {'yes' if wanted == found else 'NO'}.")
    report.note(
        f"Checkpoints read: {disturbed.num_checkpoints_read}, unreadable: {disturbed.num_unreadable}. "
        f"Goodput: {max_steps / taken:.3f} of the steps taken, {seconds / total:.3f} of the time (each start takes "
        "seconds, the whole training a minute)."
    )
    return report


if __name__ == "__main__":
    sys.exit(run(main))
