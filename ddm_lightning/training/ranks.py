"""Ranks of one member on one machine: rank zero starts the others, and ends all of them when one fails.

Rank zero is the process that the user started. A failing rank writes its reason to a file and prints nothing; rank zero
prints the reason once, ends the other ranks and returns the exit code.
"""

from __future__ import annotations

import contextlib
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
from torch.distributed.checkpoint.api import CheckpointException

from ddm_lightning.core.errors import UserError, line_of
from ddm_lightning.core.files import atomic_write_json
from ddm_lightning.core.processes import STARTED_BY, held_back, on_orphaned

_POLL_SECONDS = 0.5
# A lost rank shows in the others within this time; they then end by themselves within a second.
_NOTICE_SECONDS = 3.0
_UNWIND_SECONDS = 20.0
_EXIT_SECONDS = 5.0
_FINISHED_POLL_SECONDS = 0.05


def _number(name: str, default: int) -> int:
    """Value of an environment variable."""
    return int(os.environ.get(name, default))


def leads() -> bool:
    """Whether this process is rank zero; the ranks it starts run the same command line."""
    return _number("LOCAL_RANK", 0) == 0


def _num_external() -> int:
    """Number of ranks started by torchrun or a similar launcher; 1 if there is none."""
    if STARTED_BY in os.environ or "LOCAL_RANK" not in os.environ:
        return 1
    return max(_number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0) + 1)


def check_launch(devices: int) -> None:
    """Check that a launcher such as torchrun has started one rank per device.

    Raises:
        UserError: it started more or fewer, or ranks on several nodes.
    """
    number = _num_external()
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and STARTED_BY not in os.environ
    if number > _number("LOCAL_WORLD_SIZE", number):
        raise UserError("processes of fit were started on several nodes; start fit on one node, the member's island")
    if number != devices and (number > 1 or by_torchrun):
        problem = f"{number} processes of fit were started, as by torchrun, but island.devices = {devices}"
        raise UserError(f"{problem}; start fit only once, and it starts one process per device")


class OwnProcesses(LightningEnvironment):
    """Ranks are started by rank zero or by torchrun; tasks of a SLURM job are not ranks."""

    @property
    def creates_processes_externally(self) -> bool:
        """Whether this process starts no ranks."""
        return not leads() or _num_external() > 1


@dataclass(frozen=True)
class RankFailure:
    """Why a rank failed."""

    text: str
    """One line, or a traceback."""
    known: bool
    """Whether ``text`` is a line about an error the user can fix."""


class RankLauncher(_SubprocessScriptLauncher):
    """Start the other ranks and watch them.

    Lightning's launcher looks for failed ranks every five seconds, then kills this process, too, without a message and
    with another exit code.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: L.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other ranks, then call ``function``."""
        self._folder = Path(tempfile.mkdtemp(prefix="ddm-lightning-ranks-"))
        self._over = threading.Event()
        for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK"):  # of another job
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
                # A request to stop before the first step: the others would print fifty lines about a lost connection.
                self.kill(signal.SIGKILL)
            raise

    def failure(self, seconds: float = 0.0) -> RankFailure | None:
        """Failure of another rank; wait for one for at most ``seconds``.

        Of several: an error the user can fix, else a signal, because the loss of a rank makes others fail.
        """
        end = time.monotonic() + seconds
        while (found := self._failure()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _failure(self) -> RankFailure | None:
        # Exit code 0 counts: finished ranks wait for ``end``. Read codes before reasons, which ranks write before.
        ended = {rank: code for rank, process in enumerate(self.procs, 1) if (code := process.poll()) is not None}
        reasons = {
            int(path.stem): RankFailure(**json.loads(path.read_text())) for path in self._folder.glob("[0-9]*.json")
        }
        found = [reason for reason in reasons.values() if reason.known]
        for rank, code in ended.items():
            if code < 0:
                name = f"rank {rank} of {self.num_processes} was ended by {signal.Signals(-code).name}"
                found.append(RankFailure(f"{name}; the same command resumes at the newest checkpoint", known=True))
        found += [RankFailure(f"rank {rank}: {reason.text}", known=False) for rank, reason in reasons.items()]
        found += [RankFailure(f"rank {rank} ended with exit code {code}", known=False) for rank, code in ended.items()]
        return found[0] if found else None

    def _watch(self) -> None:
        """End this process if another rank failed, because it may wait for that rank in a collective forever."""
        while not self._over.wait(_POLL_SECONDS):
            if failure := self._failure():
                if not self._over.wait(_UNWIND_SECONDS):
                    self.kill(signal.SIGKILL)
                    print(f"error: {failure.text}", file=sys.stderr, flush=True)
                    shutil.rmtree(self._folder, ignore_errors=True)
                    os._exit(2 if failure.known else 1)
                return

    def end(self, *, kill: bool) -> None:
        """Stop watching; with ``kill``, end the remaining ranks."""
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
    """Within the block, raise failures of ranks that this process started as its own.

    Raises:
        UserError: another rank failed of an error the user can fix, or a signal ended it.
        RuntimeError: another rank failed.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, RankLauncher):
        yield
        return
    finished = False
    try:
        yield
        finished = trainer.state.finished
    except (Exception, CheckpointException) as error:
        failure = None if line_of(error) else launcher.failure(_NOTICE_SECONDS)
        if failure is None:
            raise
        raise (UserError if failure.known else RuntimeError)(failure.text) from error
    finally:
        launcher.end(kill=not finished)


@contextlib.contextmanager
def handing_over() -> Iterator[None]:
    """Within the block, write the failure of a started rank to a file, and end when rank zero is gone.

    The rank leaves the block when rank zero has finished, so that ending earlier counts as a failure.
    """
    if STARTED_BY not in os.environ:
        yield
        return
    pid, _, name = os.environ[STARTED_BY].partition(":")
    folder, over = Path(name), threading.Event()

    def end_as_orphan() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    on_orphaned(int(pid), end_as_orphan, over)  # otherwise it would wait in a collective forever
    try:
        yield
        while folder.exists():
            time.sleep(_FINISHED_POLL_SECONDS)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # rank zero prints it
        if os.getppid() != int(pid):
            end_as_orphan()
        line = line_of(error)
        failure = RankFailure(line or "".join(traceback.format_exception(error)), known=line is not None)
        try:
            atomic_write_json(folder / f"{os.environ['LOCAL_RANK']}.json", asdict(failure))
        except OSError:
            raise error from None  # printed twice rather than not at all
        raise SystemExit(1) from None
    finally:
        over.set()
