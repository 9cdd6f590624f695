"""Limits of what a test may take: time for something that should fail at once, and processes that end with it."""

import multiprocessing
import signal
from contextlib import contextmanager


@contextmanager
def within(seconds):
    """Raise ``TimeoutError`` in the main thread when the block takes longer."""

    def expire(number, frame):
        raise TimeoutError(f"still waiting after {seconds} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def no_process_left():
    """Check that the processes that the block starts have ended; those of earlier tests may still be ending."""
    earlier = multiprocessing.active_children()
    yield
    for process in multiprocessing.active_children():
        if process not in earlier:
            process.join(60)
            assert not process.is_alive(), process
