"""Slots: leave a machine that is lent for a limited time before that time is over, with all work published.

A thread beside the training sends this process SIGTERM early enough for a step, a checkpoint and a publication, judged
by how long they have taken so far. What is not done when the time is over is given up: nothing half-written counts, and
any machine goes on from the newest published checkpoint.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.environment import ALONE, Ranks
from ddm_lightning.core.errors import UserError, say
from ddm_lightning.core.processes import STARTED, STOPPED
from ddm_lightning.islands.publish import Publisher
from ddm_lightning.members.checkpoints import newest_checkpoint
from ddm_lightning.members.member import Member
from ddm_lightning.members.run import Run
from ddm_lightning.training import ranks

LEAVING_SECONDS = 5.0
"""Time to leave in, besides that of a step, a checkpoint and a publication."""
_POLL_SECONDS = 1.0
_SAFETY = 2.0


def seconds_left(island: IslandConfig) -> float:
    """Seconds until the island's slot ends; infinite while there is no limit.

    Raises:
        UserError: the lender's file holds no time.
        OSError: it cannot be read.
    """
    if island.max_minutes is None:
        own = math.inf
    else:
        own = 60 * island.max_minutes - (time.monotonic() - STARTED)

    if island.lease_file is None:
        return own

    return min(own, _lent_until(Path(island.lease_file)) - time.time())


def _lent_until(path: Path) -> float:
    """Unix time in a lender's file; infinite without the file."""
    try:
        text = path.expanduser().read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return math.inf

    with suppress(ValueError, OverflowError):
        if "-" in text:
            end = datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
        else:
            end = float(text)

        if math.isfinite(end):
            return end

    raise UserError(
        f"key 'island.lease_file': {path}: holds {text[:40]!r}, which is no time; write the end of the slot as "
        "2026-11-25T18:30:00+01:00, or in seconds since 1970"
    )


class Slot:
    """Stops the training of a ``with`` block in time for it to end within the island's slot.

    Args:
        member: the member.
        run: its run.
        mine: this process's place.
    """

    publisher: Publisher | None = None
    """Publishes the training, if the run has a URL."""

    def __init__(self, member: Member, run: Run, mine: Ranks = ALONE) -> None:
        self.member = member
        self.name = member.name
        self.run = run
        self.mine = mine
        self.island = run.experiment.island
        self.folder = run.folder.member(member.name) / "checkpoints"
        self._needed = LEAVING_SECONDS
        self._grace_end = 0.0
        """Time until which a stopping process is not killed; 0 before it is told to stop."""
        self._over = threading.Event()

    def __enter__(self) -> Slot:
        """Watch the time from now on.

        Raises:
            UserError: the lender's file holds no time, or the slot is over.
            OSError: it cannot be read.
        """
        self.begin()
        # Only on the node that writes checkpoints, and not in ranks that ``fit`` started.
        if self.island.is_lent and self.mine.is_first and not self.mine.is_own:
            self._end = time.monotonic() + seconds_left(self.island)
            if self._end - time.monotonic() <= LEAVING_SECONDS:
                raise self._too_short()

            threading.Thread(target=self._watch, name="slot", daemon=True).start()

        return self

    def begin(self) -> None:
        """Note from which checkpoint the training goes on; again after a newer one has been fetched."""
        self._first = newest_checkpoint(self.folder)

    def __exit__(self, *_: object) -> None:
        """Watch no longer.

        Raises:
            UserError: the slot was over before the training had taken a step.
        """
        self._over.set()
        if self._grace_end and newest_checkpoint(self.folder) == self._first and not self.run.is_finished(self.name):
            raise self._too_short()

    def _too_short(self) -> UserError:
        return UserError(
            f"{self.name}: the slot was too short: it had to end {self._end - STARTED:.0f} s after the "
            f"start, {self._needed:.0f} s of them to leave, and no step was taken; give it more time "
            "(island.max_minutes, island.lease_file)"
        )

    def _watch(self) -> None:
        wait = 0.0
        while not self._over.wait(wait):
            # A file that is being written, or a disk that is gone for a moment, changes nothing.
            with suppress(OSError, UserError):
                self._end = time.monotonic() + seconds_left(self.island)
                self._needed = self._leaving_seconds()

            now = time.monotonic()
            left = self._end - now
            is_leaving = self._grace_end or (self.publisher is not None and self.publisher.training_over.is_set())
            if is_leaving and left <= 0 and now >= self._grace_end:
                say(f"{self.name}: its slot is over: ends at once")
                os._exit(STOPPED)

            if left <= self._needed and not is_leaving:
                self._grace_end = now + LEAVING_SECONDS
                say(f"{self.name}: its slot ends in {left:.0f} s: stops")
                os.kill(os.getpid(), signal.SIGTERM)

            wait = min(_POLL_SECONDS, max(left, 0.1))

    def _leaving_seconds(self) -> float:
        """Time that a step, a checkpoint, its publication and the end of the process may take."""
        newest = newest_checkpoint(self.folder)
        speed = self.run.status(self.name).samples_per_second
        # Writing or fetching a checkpoint takes from the time of its first file to that of its last.
        if newest:
            times = [path.stat().st_mtime for path in newest.iterdir()]
        else:
            times = [0.0]

        if self.publisher:
            publication = self.publisher.publication_seconds
        else:
            publication = 0.0

        if self.island.num_ranks > 1:
            steps = ranks.POLL_STEPS
        else:
            steps = 1

        if speed:
            step = self.member.batch_size / speed
        else:
            step = 0.0

        return LEAVING_SECONDS + _SAFETY * (steps * step + max(times) - min(times) + publication)
