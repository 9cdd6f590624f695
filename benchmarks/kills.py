"""A training that is stopped again and again: does it end in the same weights, and what does it cost?

One expert is trained undisturbed, and then by a process that is ended at random moments: by SIGKILL, by SIGTERM, and by
a disk that is full when it saves (a tmpfs; needs the right to mount one). After each end every checkpoint is read.

    python benchmarks/kills.py --json benchmarks/results/kills.json
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from common import Report, console, load, parse, parser, progress, run
from rich.progress import Progress, TaskID

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.training.checkpoint.files import damage_of

MEMBER = "expert-0"
KILL, TERMINATE, FULL_DISK = "SIGKILL", "SIGTERM", "full disk"
NUM_KILLS, MAX_STEPS = 20, 8000
QUICK_KILLS, QUICK_STEPS = 3, 1500
_DISK_MEGABYTES = 64
_MOST_SECONDS = 300.0
_WAIT_SECONDS = 0.02


@dataclass(frozen=True)
class Ending:
    """One end that is not the training's own."""

    kind: str
    at_step: int | None
    """The step from which on it comes; None for one while the process starts."""
    delay: float
    """Seconds that it comes later, so that it may come in the middle of anything."""


def endings(num: int, max_steps: int, kinds: Sequence[str], seed: int) -> list[Ending]:
    """Random ends in the order of their steps, a tenth of them while the process starts; each kind is among them."""
    draw = random.Random(seed)
    chosen = [*kinds, *draw.choices(kinds, k=max(0, num - len(kinds)))][:num]
    draw.shuffle(chosen)
    steps = sorted(draw.sample(range(1, int(0.95 * max_steps)), num))
    found = []
    for number, (kind, step) in enumerate(zip(chosen, steps, strict=True)):
        starting = number % 10 == 9
        if starting:
            kind = KILL
        found.append(Ending(kind, None if starting else step, draw.uniform(0, 6.0 if starting else 0.3)))
    return found


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    made = parser(__doc__ or "", config="experiments/tiny_2x.yaml")
    made.add_argument("--kills", type=int, default=None, help="how often (default: 20; with --quick: 3)")
    options = parse(made, arguments)
    num_kills = options.kills if options.kills is not None else QUICK_KILLS if options.quick else NUM_KILLS
    max_steps = QUICK_STEPS if options.quick else MAX_STEPS
    if not 1 <= num_kills <= max_steps // 10:
        raise UserError(f"--kills {num_kills}: must be from 1 to {max_steps // 10}, a tenth of the steps")
    settings = [
        *options.overrides,
        f"expert.train.max_steps={max_steps}",
        "island.log_every_n_steps=25",
        "island.checkpoint_every_n_steps=50",
        f"island.validate_every_n_steps={max_steps}",
        "island.log_sample_ids=true",
        # Their snapshots are written between checkpoints, and a disk may be full there, too.
        "expert.train.ema_widths=[0.1]",
    ]
    shown = console()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, progress(shown) as bars:
        task = bars.add_task("undisturbed", total=max_steps)
        reference = Trainings(options.config, settings, Path(folder) / "reference")
        reference.prepare()
        seconds, _ = reference.live(None, bars, task)
        task = bars.add_task("disturbed", total=max_steps)
        with small_disk(Path(folder) / "disk") as can_fill:
            kinds = [KILL, TERMINATE, *([FULL_DISK] if can_fill else [])]
            disturbed = Trainings(options.config, settings, Path(folder) / "disk" / "run")
            disturbed.prepare()
            lives = [disturbed.live(ending, bars, task) for ending in endings(num_kills, max_steps, kinds, seed=0)]
            lives.append(disturbed.live(None, bars, task))
            report = _report(reference, disturbed, seconds, lives, max_steps)
            if not can_fill:
                report.note("A tmpfs cannot be mounted here, so no disk was full.")
    report.show(shown)
    report.write(options.json)


class Trainings:
    """One run folder in which one member is trained, by as many processes as it takes."""

    def __init__(self, config: str, settings: Sequence[str], folder: Path) -> None:
        self.config, self.settings, self.run = config, [*settings, f"run_dir={folder}"], RunFolder(folder)
        self.num_unreadable = self.num_checkpoints_read = 0
        self.ends: Counter[str] = Counter()

    @property
    def experiment(self) -> Experiment:
        """With all settings."""
        return load(type("Options", (), {"config": self.config, "overrides": self.settings})())

    def prepare(self) -> None:
        """Write the shards."""
        prepare(self.experiment, self.run.root)

    def live(self, ending: Ending | None, bars: Progress, task: TaskID) -> tuple[float, str]:
        """Train until ``ending``, or to the end; seconds of wall-clock time, and what ended it.

        Raises:
            UserError: the process ended otherwise than it should have.
        """
        arguments = ["fit", "-c", self.config, *self.settings, f"member={MEMBER}"]
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "ddm_lightning", *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        ballast = self.run.root.parent / "ballast"
        try:
            if ending is not None:
                self._await(ending, process, bars, task)
                if process.poll() is None:
                    if ending.kind == FULL_DISK:
                        fill(ballast)
                    else:
                        process.send_signal(signal.SIGKILL if ending.kind == KILL else signal.SIGTERM)
            while process.poll() is None and time.monotonic() < start + _MOST_SECONDS:
                time.sleep(_WAIT_SECONDS)
                bars.update(task, completed=self._step())
        finally:
            process.kill()
            ballast.unlink(missing_ok=True)
        _, said = process.communicate()
        seconds = time.monotonic() - start
        what = _what_ended(process.returncode, said)
        if ending is None and what != "done":
            raise UserError(f"{self.run.root}: the training did not end by itself: {said}")
        self.ends[what] += 1
        self._read_checkpoints()
        return seconds, what

    def _await(self, ending: Ending, process: subprocess.Popen[str], bars: Progress, task: TaskID) -> None:
        while ending.at_step is not None and process.poll() is None:
            status = self._status()
            if status.state == "training" and status.step >= ending.at_step:
                break
            bars.update(task, completed=status.step)
            time.sleep(_WAIT_SECONDS)
        time.sleep(ending.delay)

    def _status(self) -> MemberStatus:
        return MemberStatus.read(self.run.member(MEMBER), MEMBER, 0)

    def _step(self) -> int:
        return self._status().step

    def _read_checkpoints(self) -> None:
        for path in (self.run.member(MEMBER) / "checkpoints").glob("step-*.ckpt"):
            self.num_checkpoints_read += 1
            self.num_unreadable += damage_of(path) is not None

    def steps_taken(self) -> int:
        """Steps of all lives, those taken twice included."""
        return len((self.run.member(MEMBER) / "sample_ids.txt").read_text(encoding="utf-8").splitlines())


def hashes(trainings: Trainings, what: str) -> dict[str, str]:
    """Of the weights in a folder of the member's, by their names."""
    folder = trainings.run.member(MEMBER) / what
    return {path.name: sha256_file(path) for path in folder.glob("*.safetensors")}


def _what_ended(code: int, said: str) -> str:
    if code == 2 and "is full; free some space" in said:
        return FULL_DISK
    known = {0: "done", -signal.SIGKILL: KILL, 130: TERMINATE, -signal.SIGTERM: TERMINATE}
    if code not in known:
        raise UserError(f"the training ended with code {code}: {said[-2000:]}")
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
    """``folder`` on a disk of its own, if that can be had."""
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
    reference: Trainings, disturbed: Trainings, seconds: float, lives: Sequence[tuple[float, str]], max_steps: int
) -> Report:
    taken, total = disturbed.steps_taken(), sum(spent for spent, _ in lives)
    weights, averages = ([hashes(one, what) for one in (reference, disturbed)] for what in ("artifact", "ema"))
    report = Report(f"{max_steps:,} steps, stopped {len(lives) - 1} times", ["what", "times"])
    for what, times in sorted(disturbed.ends.items()):
        report.row(what, str(times))
    report.figures |= {
        "num_stops": len(lives) - 1,
        "same_weights": float(weights[0] == weights[1]),
        "same_averages": float(averages[0] == averages[1]),
        "unreadable_checkpoints": disturbed.num_unreadable,
        "checkpoints_read": disturbed.num_checkpoints_read,
        "goodput_steps": max_steps / taken,
        "goodput_time": seconds / total,
        "seconds_undisturbed": seconds,
        "seconds_disturbed": total,
    }
    for what, (wanted, found) in (("weights", weights), (f"{len(averages[0])} snapshots of an average", averages)):
        report.note(f"The same {what}, bit for bit: {'yes' if wanted == found else 'NO'}.")
    report.note(
        f"Checkpoints read: {disturbed.num_checkpoints_read}, unreadable: {disturbed.num_unreadable}. "
        f"Goodput: {max_steps / taken:.3f} of the steps taken, {seconds / total:.3f} of the time (a start takes "
        "seconds, this training a minute)."
    )
    return report


if __name__ == "__main__":
    sys.exit(run(main))
