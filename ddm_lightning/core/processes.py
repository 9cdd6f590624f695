"""How each process starts and ends: quickly, and not without the one that it belongs to.

Lightning and Streaming bring some 4,700 modules. While they are imported nothing is garbage, yet the collector looks at
them again and again, and once more when the process ends: a third of the time of both.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

_WHILE_IMPORTING = (100_000, 50, 100)
# Of glibc's mallopt: M_MMAP_THRESHOLD (older versions refuse more than 32 MB), M_TRIM_THRESHOLD and M_TOP_PAD.
_KEPT_HEAP = ((-3, 2**25), (-3, 2**30), (-1, 2**31 - 1), (-2, 2**26))
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
"""That ask a training to leave a checkpoint and stop: a terminal's, a scheduler's, SLURM's warning."""
STARTED_BY = "DDM_LIGHTNING_STARTED_BY"
"""In the environment of ranks that the first one started: its process id, and the folder that takes their reasons."""
FITTED_BY = "DDM_LIGHTNING_FITTED_BY"
"""In the environment of members that the ``fit`` of several started: its process id."""
PARENT_SECONDS = 1.0
"""Between two looks whether that one is still there."""
_default = gc.get_threshold()


def begin() -> None:
    """Collect seldom until ``end_imports``; called where the process starts."""
    if STARTED_BY in os.environ:
        # A terminal sends them to all ranks; the first one decides, also for those that are still importing.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # ``held_back`` where it was started
    if parent := os.environ.pop(FITTED_BY, None):  # not for those that this one starts
        threading.Thread(target=_stop_with, args=(int(parent),), name="parent", daemon=True).start()
    gc.set_threshold(*_WHILE_IMPORTING)
    atexit.register(gc.freeze)


def _stop_with(parent: int) -> None:
    """A member that nobody waits for any more, as its ``fit`` was killed, holds cores that the next ``fit`` wants."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    print("the fit that started this is gone: stopping, as after SIGTERM", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within the block requests to stop wait; processes that are started there get none before ``begin``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_imports() -> None:
    """After ``begin``, collect as Python does from here on, and never again among what was imported."""
    if gc.get_threshold() == _WHILE_IMPORTING:
        gc.freeze()
        gc.set_threshold(*_default)


def stop_as_by_ctrl_c() -> None:
    """Until training itself listens, a request to stop ends this process as Ctrl-C does: with a line and its code."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in STOP_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:  # ranks that the first one started leave them to that one
            signal.signal(number, signal.default_int_handler)


def keep_heap() -> None:
    """Keep what a training step frees for the next one, where the C library is glibc; called before training.

    Else it gives a step's activations and gradients back to the system, and faults their pages in again.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in _KEPT_HEAP:
            mallopt(option, value)


def num_cores() -> int:
    """Cores that this process may use, which a scheduler may have limited; macOS knows only how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
