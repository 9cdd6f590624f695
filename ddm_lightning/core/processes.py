"""Start, stop and watch processes: signals, a parent's death, start-up time.

Lightning and Streaming import some 4,700 modules. Python's garbage collector scans them again and again and finds
nothing. This takes a third of the time to import, and again to exit, unless collection is rare.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddm_lightning.core.errors import line_of, note, say

_WHILE_IMPORTING = (100_000, 50, 100)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Ask a training to write a checkpoint and stop: from a terminal, also when it closes, or from a scheduler."""
STOPPED = 130
"""Exit code of a process that was stopped on request, as after Ctrl-C."""
FITTED_BY = "DDM_LIGHTNING_FITTED_BY"
"""Environment variable of members started by a ``fit`` of several: its process id; empty after ``begin``."""
STARTED = time.monotonic()
"""Start of this process by its own clock: the command line imports this module first."""
PARENT_SECONDS = 0.5
"""Interval at which ``on_orphaned`` looks for the parent."""
_default = gc.get_threshold()


def begin() -> None:
    """Set up a new process of the command line: output, signals, parent, rare garbage collection.

    The collection is rare until ``end_imports``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows "?" for "–"

    parent = os.environ.get(FITTED_BY)
    if parent:
        os.environ[FITTED_BY] = ""  # children of this process have another parent
        on_orphaned(int(parent), _stop_orphan)

    threading.excepthook = _report
    gc.set_threshold(*_WHILE_IMPORTING)
    atexit.register(gc.freeze)


def _report(failed: threading.ExceptHookArgs) -> None:
    """Report the error of a thread; in one line if the user can fix it, such as TensorBoard's on a full disk."""
    line = failed.exc_value and line_of(failed.exc_value)
    if line:
        note(line)
    else:
        threading.__excepthook__(failed)


def on_orphaned(parent: int, react: Callable[[], object] | None = None) -> None:
    """Call ``react`` from a thread soon after the process ``parent`` has died.

    Args:
        parent: process id of this process's parent.
        react: by default ends this process at once, even while it waits.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)

        if react is None:
            os._exit(1)

        react()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _stop_orphan() -> None:
    """Stop a member whose ``fit`` was killed: the next ``fit`` wants its cores."""
    say("the fit that started this member is gone: stopping, as after SIGTERM")
    os.kill(os.getpid(), signal.SIGTERM)


def start_time(pid: int) -> str:
    """Start of a process in clock ticks since boot; empty for a dead process or a zombie, and without ``/proc``.

    Process ids are reused; an id together with its start time is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

    fields = text.rpartition(")")[2].split()  # from field 3 of proc(5) on; the command's name may hold anything
    if fields[0] in "ZX":
        return ""

    return fields[19]


@contextlib.contextmanager
def on_stop_signal(handler: Any) -> Iterator[None]:
    """Let ``handler`` receive the stop signals within the block; in the main thread alone, as Python asks for."""

    def heard(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            _leave_closed_terminal()

        handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    previous = {}
    for number in STOP_SIGNALS:
        if is_main and not (is_nohup and number == signal.SIGHUP):
            previous[number] = signal.signal(number, heard)

    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def _leave_closed_terminal() -> None:
    """Let what is printed go nowhere if the terminal is closed: it would end the process before its checkpoint."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def end_imports() -> None:
    """Restore Python's garbage collection after ``begin``; imported objects are never scanned again."""
    if gc.get_threshold() == _WHILE_IMPORTING:
        gc.freeze()
        gc.set_threshold(*_default)


def stop_as_by_ctrl_c() -> None:
    """Raise ``KeyboardInterrupt`` on stop signals until training installs its own handlers."""
    if threading.current_thread() is not threading.main_thread():
        return

    for number in STOP_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def num_cores() -> int:
    """Number of cores available to this process; all cores where the system has no affinity (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))

    return os.cpu_count() or 1
