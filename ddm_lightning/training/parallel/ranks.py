"""Several ranks of one member on one machine: who starts them, and what becomes of all when one fails.

The first rank is the process that the user started; it starts the others. One that fails hands its reason over to the
first and says nothing itself; the first says it once, ends the others, and has the exit code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it without saying so
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.rendezvous import rendezvous

from ddm_lightning.core.errors import UserError, line_of
from ddm_lightning.core.files import atomic_write_json
from ddm_lightning.core.processes import STARTED_BY, held_back, on_orphaned

_POLL_SECONDS = 0.5
# A rank's loss shows in the others within so long, and where it does they end by themselves within the second.
_NOTICE_SECONDS = 3.0
_UNWIND_SECONDS = 20.0
_EXIT_SECONDS = 5.0
_THROUGH_SECONDS = 0.05


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"environment variable {name}={text}: has to be a number; unset it, or start fit by torchrun")
    return int(text)


def leads() -> bool:
    """Whether this process is the first rank; the others, which it starts, run the same command line."""
    return _number("LOCAL_RANK", 0) == 0


def _num_started_by_another() -> int:
    """Ranks that torchrun or the like has started; 1 where none has."""
    if STARTED_BY in os.environ or "LOCAL_RANK" not in os.environ:
        return 1
    return max(_number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0) + 1)


def check_launch(devices: int) -> None:
    """Look whether ranks that another program has started are as many as there are devices.

    Raises:
        UserError: they are more or fewer, or on several nodes.
    """
    number = _num_started_by_another()
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and STARTED_BY not in os.environ
    if number > _number("LOCAL_WORLD_SIZE", number):
        raise UserError("processes of fit were started on several nodes; a member trains on one, its island")
    if number != devices and (number > 1 or by_torchrun):
        raise UserError(
            f"{number} processes of fit were started, as torchrun does, and island.devices = {devices}; "
            "run it once, without torchrun, and it starts a process for each device"
        )


@contextlib.contextmanager
def after_the_first(what: str) -> Iterator[None]:
    """The other ranks enter the block when the first one has left it: they find what it decided.

    Those that the first one starts come later anyway; those of torchrun start beside it.

    Args:
        what: is decided; once in a process.

    Raises:
        SystemExit: the first one failed, which says why.
    """
    store = _store_of_ranks()
    if store is None:
        yield
        return
    if not leads():
        if store.get(what) == b"failed":
            raise SystemExit(2)
        yield
        return
    try:
        yield
    except BaseException:
        store.set(what, "failed")
        raise
    store.set(what, "decided")


@functools.cache  # the first rank serves it, to their process group, too, which takes the same port later
def _store_of_ranks() -> TCPStore | None:
    """What ranks that another program has started share before there is a process group; None where none are."""
    number = _num_started_by_another()
    if number == 1:
        return None
    place = OwnProcesses()
    os.environ.setdefault("MASTER_ADDR", place.main_address)
    os.environ.setdefault("MASTER_PORT", str(place.main_port))
    store: TCPStore
    store, *_ = next(rendezvous("env://", rank=place.local_rank(), world_size=number))
    return store


class OwnProcesses(LightningEnvironment):
    """Ranks are those that the first one starts, or torchrun: not the tasks of a job of SLURM's."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the other ranks are there, or will be, without this one's doing."""
        return not leads() or _num_started_by_another() > 1


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed."""

    text: str
    """A line, or a traceback."""
    known: bool
    """Whether it is a line that says what to do."""


class RankLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks and watches them.

    Lightning's own looks every five seconds whether one has failed, and then kills this process, too: without a word,
    with another exit code than the reason's, and perhaps while it is about to say the reason.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks, then call ``function``."""
        self._folder = Path(tempfile.mkdtemp(prefix="ddm-lightning-ranks-"))
        self._over = threading.Event()
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):  # of another job than this one
            os.environ.pop(name, None)
        os.environ[STARTED_BY] = f"{os.getpid()}:{self._folder}"
        try:
            with held_back():
                self._call_children_scripts()
        finally:
            del os.environ[STARTED_BY]
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception | CheckpointException):
                # A request to stop before the first step: now, or they say in fifty lines that this one hangs up.
                self.kill(signal.SIGKILL)
            raise

    def failure(self, seconds: float = 0.0) -> RankFailure | None:
        """Why another rank failed; waits at most ``seconds`` for one that does.

        Of several reasons that a user can do something about, then a signal: the loss of a rank makes others fail.
        """
        end = time.monotonic() + seconds
        while (found := self._failure()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _failure(self) -> RankFailure | None:
        # Also with exit code 0, as those that are through wait for ``end``; before the reasons, which they leave first.
        ended = {rank: code for rank, process in enumerate(self.procs, 1) if (code := process.poll()) is not None}
        said = {
            int(path.stem): RankFailure(**json.loads(path.read_text())) for path in self._folder.glob("[0-9]*.json")
        }
        found = [failure for failure in said.values() if failure.known]
        for rank, code in ended.items():
            if code < 0:
                known = {number.value: number.name for number in signal.Signals}
                name = f"rank {rank} of {self.num_processes} was ended by {known.get(-code, f'signal {-code}')}"
                found.append(RankFailure(f"{name}; the same command goes on at the newest checkpoint", known=True))
        found += [RankFailure(f"rank {rank}: {failure.text}", known=False) for rank, failure in said.items()]
        found += [RankFailure(f"rank {rank} ended with exit code {code}", known=False) for rank, code in ended.items()]
        return found[0] if found else None

    def _watch(self) -> None:
        """End this process, too, if another rank failed and this one waits for it in a collective for ever."""
        while not self._over.wait(_POLL_SECONDS):
            failure = self._failure()
            if failure is None:
                continue
            if not self._over.wait(_UNWIND_SECONDS):
                self.kill(signal.SIGKILL)
                print(f"error: {failure.text}", file=sys.stderr, flush=True)
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(2 if failure.known else 1)
            return

    def end(self, *, kill: bool) -> None:
        """Watch no more; ``kill`` the ranks that are left."""
        if not hasattr(self, "_folder"):
            return
        self._over.set()
        if kill:
            self.kill(signal.SIGKILL)
            for process in self.procs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_EXIT_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def speaking_for_all(trainer: L.Trainer) -> Iterator[None]:
    """Within the block this process speaks for the ranks that it starts: a failure of one of them is its own.

    Raises:
        UserError: another rank failed of what a user can do something about, or a signal ended it.
        RuntimeError: another rank failed.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, RankLauncher):
        yield
        return
    whole = False
    try:
        yield
        whole = trainer.state.finished
    except (Exception, CheckpointException) as error:
        failure = None if line_of(error) else launcher.failure(_NOTICE_SECONDS)
        if failure is None:
            raise
        if failure.known:
            raise UserError(failure.text) from error
        raise RuntimeError(failure.text) from error
    finally:
        launcher.end(kill=not whole)


@contextlib.contextmanager
def handing_over() -> Iterator[None]:
    """Within the block a rank that was started hands over why it fails, and ends when the first one is gone.

    It leaves the block when the first one needs the ranks no more, so that an earlier end of it is a failure.
    """
    if STARTED_BY not in os.environ:
        yield
        return
    pid, _, folder = os.environ[STARTED_BY].partition(":")
    over = threading.Event()
    on_orphaned(int(pid), lambda: _end_as_orphan(Path(folder)), over)  # it would wait in a collective for ever
    try:
        yield
        while Path(folder).exists():
            time.sleep(_THROUGH_SECONDS)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # it is said by the first rank
        if os.getppid() != int(pid):
            _end_as_orphan(Path(folder))
        line = line_of(error)
        failure = RankFailure(line or "".join(traceback.format_exception(error)), known=line is not None)
        try:
            atomic_write_json(Path(folder) / f"{os.environ['LOCAL_RANK']}.json", asdict(failure))
        except OSError:
            raise error from None  # said twice rather than not at all
        raise SystemExit(1) from None
    finally:
        over.set()


def _end_as_orphan(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
