"""The command line, in which one rank fails while a checkpoint is written: ``FAILS`` is its number, how, and the step.

Or it has no memory for sample images, or it is late: to find a checkpoint damaged, or to begin with its steps. Then it
makes the file ``LATE`` and waits until that is gone.

A file to be run, because ranks are started by the command line of the first.
"""

import errno
import itertools
import os
import signal
import sys
import time
from pathlib import Path

from ddm_lightning.cli.parser import main
from ddm_lightning.members import checkpoints
from ddm_lightning.training import callbacks, checkpoint, previews

LATE_SECONDS = 5


def full(path):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def bug(path):
    raise ValueError(f"a mistake in {path.name}")


def killed(path):
    os.kill(os.getpid(), signal.SIGKILL)


def fail_at(step, fail):
    """Behind this rank's tensors for a signal, else before the ranks work together: the others learn nothing of it."""
    name = f"step-{step:08d}.ckpt"
    kind, method = (
        (checkpoint.HuggingFaceStorageWriter, "write_data")
        if fail is killed
        else (checkpoint.CheckpointWriter, "_write")
    )
    before = getattr(kind, method)

    def patched(self, *arguments):
        path = Path(self.path) if fail is killed else arguments[0]
        if fail is not killed and path.name == name:
            fail(path)

        written = before(self, *arguments)
        if path.name.endswith(name):
            fail(path)

        return written

    setattr(kind, method, patched)


def no_memory_for_images():
    """At the second evaluation of the network, while the others take part in the first layers of theirs."""
    before = previews.velocity_of
    calls = itertools.count()

    def patched(*arguments):
        if next(calls):
            raise MemoryError("tried to allocate 2 GiB")
        return before(*arguments)

    previews.velocity_of = patched


def late(place, name, wait):
    before = getattr(place, name)

    def patched(*arguments):
        wait()
        return before(*arguments)

    setattr(place, name, patched)


def wait_for_the_test():
    path = Path(os.environ["LATE"])
    path.touch()
    while path.exists():
        time.sleep(0.02)


if __name__ == "__main__":
    rank, how, at_step = os.environ["FAILS"].split()
    if os.environ.get("LOCAL_RANK", "0") == rank:
        if how == "late-steps":
            late(callbacks.StopOnRequest, "on_train_start", wait_for_the_test)
        elif how == "late-damage":
            late(checkpoints, "damage_of", lambda: time.sleep(LATE_SECONDS))
        elif how == "images":
            no_memory_for_images()
        else:
            fail_at(int(at_step), {"full": full, "bug": bug, "killed": killed}[how])
    sys.exit(main())
