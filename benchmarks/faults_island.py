"""One member's training under faults, watched as an engine would: what ends is started again."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
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

import numpy as np
from common import LOGS_SAMPLES, Child

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError

FULL_DISK = "full disk"
CLOCK = "clock jump"
LEASE = "end of a lease"
MINUTE = 60.0
PAUSES = {"SIGSTOP for 5 s": 5.0, "SIGSTOP for a minute": MINUTE}
TAKEN_OVER = "SIGSTOP for a minute, taken over elsewhere"
HARMED = "members_harmed"
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


class Training(Child):
    """A process that trains a member, and the steps that it has begun."""

    def __init__(self, words: Sequence[str], file: Path, elsewhere: bool, variables: dict[str, str]) -> None:
        self.file = file
        self.is_elsewhere = elsewhere
        self.until = float("inf")
        """Monotonic time after which its steps do not count."""
        before = _ELSEWHERE * elsewhere
        super().__init__("ddm_lightning", *words, before=before, variables={**variables, "STEP_LOG": str(file)})

    def steps(self) -> list[tuple[int, float]]:
        """Number and monotonic time of each step that it has begun."""
        found = []
        with suppress(FileNotFoundError):
            *lines, _ = self.file.read_text(encoding="utf-8").split("\n")  # the last one is not yet whole
            for number, began in map(str.split, lines):
                if float(began) < self.until:
                    found.append((int(number), float(began)))

        return found

    def signal(self, number: int) -> None:
        """Send a signal to the training itself; nothing happens if it has ended."""
        if self.is_elsewhere and self.poll() is None:
            os.kill(self.children()[0], number)
        else:
            self.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the end; return exit code and last line."""
        try:
            self.wait(_MOST_SECONDS)
        finally:
            self.kill()

        return self.returncode, self.output().strip().rpartition("\n")[2]


@dataclass
class Island:
    """A member, the disk of its island, and the processes that train it one after another."""

    member: str
    options: Namespace
    """As ``common.start`` takes them."""
    disk: Path
    """An empty folder, or one to be."""
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
    member explains; a start that is refused while the store does not work is none."""

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

    def repeat(self) -> None:
        """Run the command of the finished member once more."""
        self._expect(self._spawn(self._folder), 0)

    def _strike(self, kind: str, began: float) -> float:
        """Do what a fault does, and see to it that the member goes on; return the fault's own seconds."""
        training = self.training
        if kind == CLOCK:
            self._hours = self._random.choice((-30, -1, 1, 30))
            self._clock.write_text(f"{3600 * self._hours:+d}", encoding="ascii")
            self._reached(training.steps()[-1][0] + 20)
            return 0.0

        if kind == "two processes for a member":
            self._expect(self._spawn(self.disk / "rival"), 2)
            return 0.0

        if kind in PAUSES:
            training.signal(signal.SIGSTOP)
            time.sleep(PAUSES[kind])
            training.signal(signal.SIGCONT)
            return time.monotonic() - began

        if kind == TAKEN_OVER:
            training.signal(signal.SIGSTOP)
            training.until = began
            self._move()
            seconds = self._restart(began, elsewhere=True)
            time.sleep(max(0.0, began + MINUTE - time.monotonic()))
            training.signal(signal.SIGCONT)
            self._expect(training, 2, "has taken it over")
            return seconds

        if kind == FULL_DISK:
            fill(self.disk / "filler")
            self._expect(training, 2, "is full")
            (self.disk / "filler").unlink()
        elif kind == LEASE:
            ends = time.time() + 3600 * self._hours + 10
            self._lease.write_text(str(ends), encoding="ascii")
            self._expect(training, 130)
            self._lease.unlink()
            began = training.steps()[-1][1]
        elif kind == "SIGTERM":
            training.signal(signal.SIGTERM)
            self._expect(training, 130)
        else:
            training.signal(signal.SIGKILL)
            training.wait()

        if kind.endswith("corrupted download"):
            with self.works:
                flip_newest(f"{self.url}/members/{self.member}/checkpoints", self._random)

        if kind.startswith("lost disk"):
            shutil.rmtree(self._folder)
            self._move()

        return self._restart(began, elsewhere=kind.endswith("elsewhere"))

    def _move(self) -> None:
        self._folder = self.disk / f"run-{len(self.trainings)}"

    def _spawn(self, folder: Path, elsewhere: bool = False) -> Training:
        words = ["fit", "-c", self.options.config, *self.options.overrides]
        words += [LOGS_SAMPLES, f"run_dir={folder}"]
        words += [f"island.lease_file={self._lease}", f"remote={self.url}", f"member={self.member}"]
        name = f"{self.member}-{folder.name}-{len(self.trainings)}.steps"
        return Training(words, self.disk.parent / name, elsewhere, self._variables)

    def _restart(self, since: float | None = None, *, elsewhere: bool = False) -> float:
        """Start the member until it trains or is finished; return the seconds from ``since`` to its first step."""
        end = time.monotonic() + _MOST_SECONDS
        while time.monotonic() < end and not self.over.is_set():
            training = self._spawn(self._folder, elsewhere)
            self.trainings.append(training)
            while training.poll() is None and not training.steps():
                time.sleep(_POLL_SECONDS)

            if training.steps() or training.poll() == 0:
                _, began = [*training.steps(), (0, time.monotonic())][0]
                return began - (since or began)

            code, said = training.end()
            if code != 2:
                self.record[HARMED].append(f"{self.member}: a start ended with code {code}: {said}")

            time.sleep(1)

        raise UserError(f"{self.member}: does not start")

    def _reached(self, step: int | None) -> bool:
        """Wait for a step, or for the end; return whether the member still trains."""
        while self.training.poll() != 0:
            steps = self.training.steps()
            if self.training.poll() is not None:
                self._expect(self.training, 0)
                self._restart()
            elif step is not None and steps and steps[-1][0] >= step:
                return True

            time.sleep(_POLL_SECONDS)

        return False

    def _expect(self, training: Training, code: int, words: str = "") -> None:
        found, said = training.end()
        if found != code or words not in said:
            self.record[HARMED].append(f"{self.member}: ended with code {found}, not {code}: {said}")

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
        for (step, began), (_, after) in pairwise([*log, (0, math.nan)]):
            seconds[step] = after - began

    each = np.array(list(seconds.values()))
    usual = np.nanmedian(each)
    useful = np.where(each <= STALL_SECONDS, each, usual).sum()
    times = [began for log in logs for _, began in log]
    return useful, max(times) + usual - min(times)


def clock_variables(file: Path) -> dict[str, str]:
    """Environment of a process whose time of day is off by the seconds in ``file``; takes a C compiler."""
    file.write_text("0", encoding="ascii")
    library = file.with_suffix(".so")
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=_CLOCK_SOURCE, text=True, check=True, timeout=60)
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
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small tmpfs on ``folder`` within the block; takes the right to do so."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MEGABYTES}m", "tmpfs", str(folder)]
    subprocess.run(["mount", *options], check=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)
