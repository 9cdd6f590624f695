"""One member's training under faults, watched as an engine would: what ends is started again."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import LOGS_SAMPLES, Child

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError

FULL_DISK = "full disk"
CLOCK = "clock jump"
LEASE = "end of a lease"
MINUTE = 60.0
STALL_SECONDS = 5.0
"""A step that lasts longer, instead of half a second, is a stall. A busy machine alone causes two or three seconds."""
_DISK_MEGABYTES = 64
_POLL_SECONDS = 0.1
_MOST_SECONDS = 600.0
# Not libfaketime, which wakes up threads that wait for a lock again and again: a step takes three times as long.
_CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    char text[32] = "";
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = original(clock, now), file = clock == CLOCK_REALTIME ? open(getenv("CLOCK_FILE"), O_RDONLY) : -1;
    if (file >= 0) {
        if (read(file, text, sizeof text - 1) > 0) now->tv_sec += atol(text);
        close(file);
    }
    return failed;
}
"""
# Process ids of its own, as another machine has: nobody can look whether an earlier process lives.
_ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


class Training:
    """A process that trains a member, and the steps that it has begun."""

    def __init__(self, words: Sequence[str], log: Path, before: Sequence[str], variables: dict[str, str]) -> None:
        self.log = log
        self.is_elsewhere = bool(before)
        self.until = float("inf")
        """Monotonic time after which its steps do not count."""
        self.process = Child("ddm_lightning", *words, before=before, variables={**variables, "STEP_LOG": str(log)})

    def steps(self) -> list[tuple[int, float]]:
        """Number and monotonic time of each step that it has begun."""
        if not self.log.exists():
            return []

        found = []
        for line in self.log.read_text(encoding="utf-8").splitlines(keepends=True):
            number, _, began = line.partition(" ")
            if line.endswith("\n") and float(began) < self.until:
                found.append((int(number), float(began)))

        return found

    def signal(self, number: int) -> None:
        """Send a signal to the training itself; nothing happens if it has ended."""
        pid = self.process.pid
        if self.process.poll() is None:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
            os.kill(int(children[0]) if self.is_elsewhere else pid, number)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return exit code and last line."""
        try:
            self.process.wait(_MOST_SECONDS)
        finally:
            self.process.kill()

        return self.process.returncode, self.process.output().strip().rpartition("\n")[2]


@dataclass
class Island:
    """A member, the disk of its island, and the processes that train it one after another."""

    member: str
    options: Namespace
    """As ``common.start`` takes them."""
    disk: Path
    """An empty folder."""
    url: str
    """Where the islands meet."""
    faults: Sequence[tuple[str, int]]
    """Kind of each planned fault, and the step after whose begin it strikes; in the order of steps."""
    works: threading.Lock
    """Held while the store does not work."""
    over: threading.Event
    """No process is started once it is set."""
    record: dict[str, list[Any]]
    """Of all islands. ``faults``: kind and member of each fault that happened, and the seconds that it itself took:
    until the end of a pause, or until a new process began its first step. ``members_harmed``: what no fault of the
    member explains. ``starts_refused``: last lines of processes that could not start, such as while the store did not
    work."""

    def __post_init__(self) -> None:
        self.trainings: list[Training] = []
        self.seconds_of_faults = 0.0
        self._random = random.Random(f"{self.member} {self.faults}")
        self._clock = self.disk.parent / f"{self.member}.clock"
        self._lease = self.disk.parent / f"{self.member}.lease"
        self._variables: dict[str, str] = {}
        if CLOCK in dict(self.faults):
            self._variables = clock_variables(self._clock)

        self._hours = 0
        self._move()

    @property
    def training(self) -> Training:
        """The process that trains the member now."""
        return self.trainings[-1]

    def train(self) -> None:
        """Train to the last step, through all faults.

        Raises:
            UserError: the member does not come back.
        """
        self._restart()
        for kind, step in self.faults:
            if self._reached(step):
                seconds = self._strike(kind, time.monotonic())
                self.record["faults"].append((kind, self.member, seconds))
                self.seconds_of_faults += seconds

        self._reached(None)

    def kill(self) -> None:
        """Leave no process behind."""
        for training in self.trainings:
            training.process.kill()

    def repeat(self) -> None:
        """Run the command of the finished member once more."""
        self._expect(self._spawn(self._folder).end(), 0)

    def _strike(self, kind: str, began: float) -> float:
        """Do what a fault does, and see to it that the member goes on; return the fault's own seconds."""
        training = self.training
        if kind == CLOCK:
            self._hours = self._random.choice((-30, -1, 1, 30))
            self._clock.write_text(f"{3600 * self._hours:+d}", encoding="ascii")
            self._reached(training.steps()[-1][0] + 20)
            return 0.0

        if kind == "two processes for a member":
            self._expect(self._spawn(self.disk / "rival").end(), 2)
            return 0.0

        if kind.startswith("SIGSTOP"):
            training.signal(signal.SIGSTOP)
            if not kind.endswith("taken over elsewhere"):
                time.sleep(MINUTE if kind.endswith("minute") else 5.0)
                training.signal(signal.SIGCONT)
                return time.monotonic() - began

            training.until = began
            self._move()
            seconds = self._restart(began, _ELSEWHERE)
            time.sleep(max(0.0, began + MINUTE - time.monotonic()))
            training.signal(signal.SIGCONT)
            self._expect(training.end(), 2, "has taken it over")
            return seconds

        if kind == FULL_DISK:
            fill(self.disk / "filler")
            self._expect(training.end(), 2, "is full")
            (self.disk / "filler").unlink()
        elif kind == LEASE:
            self._lease.write_text(str(time.time() + 3600 * self._hours + 10), encoding="ascii")
            self._expect(training.end(), 130)
            self._lease.unlink()
            began = training.steps()[-1][1]
        elif kind == "SIGTERM":
            training.signal(signal.SIGTERM)
            self._expect(training.end(), 130)
        else:
            training.signal(signal.SIGKILL)
            training.process.wait()

        if kind.endswith("corrupted download"):
            with self.works:
                flip_newest(f"{self.url}/members/{self.member}/checkpoints", self._random)

        if kind.startswith("lost disk"):
            shutil.rmtree(self._folder)
            self._move()

        return self._restart(began, _ELSEWHERE if kind.endswith("elsewhere") else ())

    def _move(self) -> None:
        self._folder = self.disk / f"run-{len(self.trainings)}"

    def _spawn(self, folder: Path, before: Sequence[str] = ()) -> Training:
        words = ["fit", "-c", self.options.config, *self.options.overrides, LOGS_SAMPLES, f"run_dir={folder}"]
        log = self.disk.parent / f"{self.member}-{folder.name}-{len(self.trainings)}.steps"
        words += [f"island.lease_file={self._lease}", f"remote={self.url}", f"member={self.member}"]
        return Training(words, log, before, self._variables)

    def _restart(self, since: float | None = None, before: Sequence[str] = ()) -> float:
        """Start the member until it trains or is finished; return the seconds from ``since`` to its first step."""
        end = time.monotonic() + _MOST_SECONDS
        while time.monotonic() < end and not self.over.is_set():
            training = self._spawn(self._folder, before)
            self.trainings.append(training)
            while training.process.poll() is None and not training.steps():
                time.sleep(_POLL_SECONDS)

            if training.steps() or training.process.poll() == 0:
                steps = training.steps() or [(0, time.monotonic())]
                began = steps[0][1]
                return began - (since or began)

            code, said = training.end()
            key = "starts_refused" if code == 2 else "members_harmed"
            self.record[key].append(f"{self.member}: a start ended with code {code}: {said}")
            time.sleep(1)

        raise UserError(f"{self.member}: does not start: {self.record['starts_refused']}")

    def _reached(self, step: int | None) -> bool:
        """Wait for a step, or for the end; return whether the member still trains."""
        while self.training.process.poll() != 0:
            steps = self.training.steps()
            if self.training.process.poll() is not None:
                self._expect(self.training.end(), 0)
                self._restart()
            elif step is not None and steps and steps[-1][0] >= step:
                return True

            time.sleep(_POLL_SECONDS)

        return False

    def _expect(self, end: tuple[int, str], code: int, words: str = "") -> None:
        if end[0] != code or words not in end[1]:
            self.record["members_harmed"].append(f"{self.member}: ended with code {end[0]}, not {code}: {end[1]}")

    def useful_and_total(self) -> tuple[float, float]:
        """Seconds of useful steps, and all seconds less those that the faults took themselves; see ``useful_time``."""
        useful, total = useful_time([training.steps() for training in self.trainings])
        return useful, total - self.seconds_of_faults


def useful_time(logs: Sequence[Sequence[tuple[int, float]]]) -> tuple[float, float]:
    """Seconds of the steps that were not repeated, and seconds from the first to the last.

    A step lasts until its process begins the next one. A stall and a step at the end of a process count as the median.

    Args:
        logs: number of each step and the time at which it began, for the processes in their order.
    """
    seconds: dict[int, float] = {}
    for log in logs:
        for (step, began), (_, after) in pairwise(log):
            seconds[step] = after - began

        for step, _ in log[-1:]:
            seconds[step] = math.nan

    usual = statistics.median(one for one in seconds.values() if not math.isnan(one))
    useful = sum(one if one <= STALL_SECONDS else usual for one in seconds.values())
    times = [began for log in logs for _, began in log]
    return useful, max(times) + usual - min(times)


def clock_variables(file: Path) -> dict[str, str]:
    """Environment of a process whose time of day is off by the seconds in ``file``; empty without a C compiler."""
    file.write_text("0", encoding="ascii")
    library = file.with_suffix(".so")
    try:
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(command, input=_CLOCK_SOURCE, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return {}

    return {"LD_PRELOAD": str(library), "CLOCK_FILE": str(file)}


def flip_newest(url: str, generator: random.Random) -> None:
    """Flip a byte in one file of the newest checkpoint below ``url``, if there is one.

    Raises:
        OSError: the store cannot be reached.
    """
    names = sorted(remote.files(url))
    if names:
        newest = names[-1].partition("/")[0]
        name = generator.choice([name for name in names if name.startswith(newest)])
        flip(f"{url}/{name}", generator)


def flip(url: str, generator: random.Random) -> None:
    """Flip all bits of one byte of a file.

    Raises:
        OSError: the store cannot be reached.
    """
    content = bytearray(remote.read(url))
    content[generator.randrange(len(content))] ^= 0xFF
    remote.write(url, bytes(content))


def fill(path: Path) -> None:
    """Write ``path`` until its disk is full."""
    with path.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(4096))


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small tmpfs on ``folder`` within the block; yield whether that worked."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MEGABYTES}m", "tmpfs", str(folder)]
    mounted = subprocess.run(["mount", *options], capture_output=True, timeout=20, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)
