"""Publish a member's training at the run's URL while it trains, and continue it from there on any machine.

Two threads beside the training send what is new in the member's folder: one a heartbeat with the status, which a long
upload must not delay, the other the newest checkpoint, curves and, at the end, the artifact. A store that is down costs
a line and another attempt, never a step.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from ddm_lightning.core import remote
from ddm_lightning.core.environment import ALONE, Ranks
from ddm_lightning.core.errors import UserError, first_line, say
from ddm_lightning.core.files import move_folder
from ddm_lightning.islands import lease
from ddm_lightning.islands.lease import Lease, LostLeaseError
from ddm_lightning.islands.shared import pull_artifact, send_artifact
from ddm_lightning.members.checkpoints import FILES, TEMPORARY, damage_of, find_resumable, newest_checkpoint, step_of
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import break_mark

FINAL_SECONDS = 600.0
"""Time to try to publish the artifact of a finished training."""
STOP_SECONDS = 20.0
"""Time to try to publish after a stop; a scheduler kills what takes longer."""
# Checkpoints kept at the URL.
_KEPT = 2
# File that makes a checkpoint whole, as it is sent last.
_WHOLE = re.escape(FILES)
_EARLY_SECONDS = 2.0
# What is sent and fetched besides checkpoints and the artifact: curves, averages, and text that callbacks write.
# Nothing else, as schedulers keep pickles here.
_SHARED = re.compile(r"(csv|ema|tensorboard)/.+|(?!log\.txt)[^./][^/]*\.(csv|jsonl|txt)")


class _Checkpoint(NamedTuple):
    """A checkpoint at the URL."""

    step: int
    generation: int
    """Generation of the lease under which it was sent."""
    name: str
    """Its folder, relative to the member's."""


@contextmanager
def published(name: str, run: Run, mine: Ranks = ALONE) -> Iterator[Publisher | None]:
    """Hold the member's lease, fetch what is published of it, and publish what the block trains.

    Does nothing if the experiment has no ``remote``, and on all but the first of several nodes.

    Raises:
        UserError: another process trains the member or has taken it over, or the URL cannot be read or written.
    """
    if run.url is not None and mine.launched and not mine.is_own:
        raise UserError("with remote, start fit without torchrun: it starts one process per device itself")

    if run.url is None or mine.launched or mine.node > 0:
        yield None
        return

    url = f"{run.url}/members/{name}"
    with remote.reaching():
        held = lease.claim(name, f"{url}/lease")

    publisher = Publisher(name, run, held)
    publisher.start()  # before a long download, during which the lease must not become stale
    try:
        with remote.reaching():
            publisher.pull()

        yield publisher
    finally:
        publisher.finish()


class Publisher:
    """Sends new and changed files of a member's folder to the run's URL.

    Args:
        name: the member.
        run: its run, which has a URL.
        held: this process's lease.
    """

    def __init__(self, name: str, run: Run, held: Lease) -> None:
        self.name = name
        self.run = run
        self.held = held
        self.folder = run.folder.member(name)
        self.url = f"{run.url}/members/{name}"
        self._sent: dict[Path, tuple[int, int]] = {}
        self._published_step = -1
        self.training_over = threading.Event()
        self._over = threading.Event()
        """Set after the last publication, to end the heartbeats."""
        self._lost: LostLeaseError | None = None
        self._is_down = False
        self.publication_seconds = 0.0
        """Time that the longest publication of a checkpoint has taken."""
        seconds = 60 * run.experiment.island.publish_every_n_minutes
        self._publishing = self._repeating(self.publish, seconds, self.training_over)
        self._beating = self._repeating(self._beat, min(lease.HEARTBEAT_SECONDS, seconds), self._over)

    # At the start.

    def pull(self) -> None:
        """Fetch the artifact, or the newest published checkpoint if it is ahead of this folder's.

        Raises:
            OSError: the store cannot be read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        break_mark(self.folder)
        there = remote.files(self.url)
        pull_artifact(self.name, self.run)
        own = -1
        with suppress(UserError):  # all are damaged
            newest, _ = find_resumable(self.folder / "checkpoints")
            if newest is not None:
                own = step_of(newest)

        is_finished = self.run.is_finished(self.name)
        for one in reversed(_checkpoints(there, _WHOLE)):
            if one.step == own:
                self._published_step = own
            if one.step <= own or is_finished:
                break

            if self._pull_checkpoint(one, there):
                say(f"{self.name}: takes over the checkpoint of step {one.step} from {self.url}")
                # Curves, records of skipped steps and snapshots of averages, which the checkpoint does not hold.
                for name in filter(_is_shared, there):
                    remote.get(f"{self.url}/{name}", self.folder / name)

                break

        for path, stamp in self._changed():
            # Averages are large, and a machine that is taken back often must not send all of them each time.
            name = path.relative_to(self.folder).as_posix()
            if path.suffix == ".safetensors" and (name, stamp[0]) in there.items():
                self._sent[path] = stamp

    def _pull_checkpoint(self, one: _Checkpoint, there: Iterable[str]) -> bool:
        path = self.folder / one.name.rpartition(".")[0]
        temporary = path.with_name(f"{TEMPORARY}{path.name}")
        try:
            for name in there:
                if name.startswith(f"{one.name}/"):
                    remote.get(f"{self.url}/{name}", temporary / name.removeprefix(f"{one.name}/"))

            problem = damage_of(temporary)
            if problem is None:
                move_folder(temporary, path)
                return True
        except FileNotFoundError as error:  # removed meanwhile
            problem = first_line(error)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

        say(f"{self.url}/{one.name}: damaged checkpoint ({problem}); looks for the one before it")
        return False

    # While it trains.

    def start(self) -> None:
        """Publish in the background until ``finish``."""
        self._beating.start()
        self._publishing.start()

    def _repeating(self, action: Callable[[], None], seconds: float, over: threading.Event) -> threading.Thread:
        # On a lent machine, a first publication tells early how long it takes to leave.
        if self.run.experiment.island.is_lent:
            early = min(seconds, _EARLY_SECONDS)
        else:
            early = seconds

        def repeat() -> None:
            while self._lost is None and not over.wait(seconds if self.publication_seconds else early):
                try:
                    action()
                    self._is_down = False
                except LostLeaseError as error:
                    if self._lost is None:
                        self._lost = error
                        os.kill(os.getpid(), signal.SIGTERM)
                except (OSError, UserError) as error:  # the latter for a file here that cannot be read for a moment
                    self._complain(error)

        return threading.Thread(target=repeat, daemon=True)

    def _complain(self, error: Exception) -> None:
        """Say once that the store is down."""
        if not self._is_down:
            say(f"{self.name}: cannot publish: {first_line(error)}; goes on and tries again")

        self._is_down = True

    def _beat(self, *, released: bool = False) -> None:
        self.held.check()
        self.held.beat(asdict(self.run.status(self.name)), released=released)

    def publish(self) -> None:
        """Send what is new; the file that makes a folder whole goes last.

        Raises:
            LostLeaseError: another process has taken the member over.
            OSError: the store cannot be written.
        """
        copy = self.folder / ".publishing"
        try:
            # Linked first, so that files older than the checkpoint are published before it.
            newest = self._link_newest(copy)
            for path, stamp in self._changed():
                with suppress(FileNotFoundError):  # removed meanwhile
                    remote.put(path, f"{self.url}/{path.relative_to(self.folder).as_posix()}")
                    self._sent[path] = stamp

            if newest is not None:
                began = time.monotonic()
                target = f"{self.url}/checkpoints/{newest.name}.{self.held.generation}"
                remote.put_folder(copy, target, FILES, self.held.check)
                self.publication_seconds = max(self.publication_seconds, time.monotonic() - began)
                self._published_step = step_of(newest)
                self._remove_old_checkpoints()
        finally:
            shutil.rmtree(copy, ignore_errors=True)

        if self.run.is_finished(self.name):
            send_artifact(self.name, self.run, self.held.check)

    def _link_newest(self, copy: Path) -> Path | None:
        """Link the files of a checkpoint that is to be sent, as training may remove it before a slow upload ends."""
        shutil.rmtree(copy, ignore_errors=True)  # of a killed process
        newest = newest_checkpoint(self.folder / "checkpoints")
        if newest is None or step_of(newest) <= self._published_step:
            return None

        copy.mkdir()
        with suppress(FileNotFoundError):  # removed meanwhile; the next one will be newer
            for path in newest.iterdir():
                try:
                    os.link(path, copy / path.name)
                except OSError:  # a disk without hard links
                    shutil.copyfile(path, copy / path.name)

            return newest

        return None

    def _remove_old_checkpoints(self) -> None:
        """Remove all but the newest checkpoints at the URL, and incomplete ones of killed processes."""
        there = [f"checkpoints/{name}" for name in remote.files(f"{self.url}/checkpoints")]
        kept = _checkpoints(there, _WHOLE)[-_KEPT:]
        for one in _checkpoints(there):
            if one not in kept and one.generation <= self.held.generation:
                remote.remove(f"{self.url}/{one.name}")

    def _changed(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        """Yield files that are new or have changed, with their sizes and times."""
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder).as_posix()
            if not (_is_shared(relative) and path.is_file()):
                continue

            state = path.stat()
            stamp = (state.st_size, state.st_mtime_ns)
            if (path, stamp) not in self._sent.items():
                yield path, stamp

    # At the end.

    def finish(self) -> None:
        """Publish the last state and release the lease.

        Raises:
            UserError: another process has taken the member over, or the artifact cannot be published. If only
                the last checkpoint cannot, a line says so: the training itself has not failed.
        """
        self.training_over.set()
        self._publishing.join()
        began = time.monotonic()
        while self._lost is None:
            try:
                self.publish()
                self._stop_beating()
                self._beat(released=True)
            except LostLeaseError as error:
                self._lost = error
            except OSError as error:
                self._complain(error)
                if self._gives_up(time.monotonic() - began, error):
                    return

                time.sleep(1)
            else:
                return

        self._stop_beating()
        raise UserError(f"{self.name}: {self._lost}, so it stopped here; nothing is lost")

    def _gives_up(self, seconds: float, error: OSError) -> bool:
        """Whether the last publication has been tried for long enough.

        Raises:
            UserError: it has, and its artifact is not published.
        """
        is_finished = self.run.is_finished(self.name)
        if seconds < (FINAL_SECONDS if is_finished else STOP_SECONDS):
            return False

        self._stop_beating()
        remedy = f"cannot be published: {first_line(error)}; repeat the command when {self.url} can be written"
        if is_finished:
            raise UserError(f"{self.name}: is finished, but its artifact {remedy}") from error

        say(f"{self.name}: stopped, but its last checkpoint {remedy}")
        return True

    def _stop_beating(self) -> None:
        self._over.set()
        self._beating.join()


def _checkpoints(there: Iterable[str], file: str = ".*") -> list[_Checkpoint]:
    """Published checkpoints by step that have a file of this pattern, from a listing of the member's files."""
    found = set()
    for name in there:
        if match := re.fullmatch(rf"(checkpoints/step-(\d{{8,}})\.ckpt\.(\d+))/{file}", name):
            found.add(_Checkpoint(int(match[2]), int(match[3]), match[1]))

    return sorted(found)


def _is_shared(relative: str) -> bool:
    """Whether to send and fetch a file of a member's folder; hidden ones are perhaps half-written."""
    return _SHARED.fullmatch(relative) is not None and "/." not in relative
