"""What other processes do in tests of the engine; they import it from here."""

import errno
import os
import signal

import numpy as np
import torch

from ddm_lightning.core.errors import UserError


def square(job):
    return job["number"], os.getpid(), torch.get_num_threads(), np.square(job["rows"])


def complain(job):
    if job == 2:
        raise UserError("key 'x': is wrong; mend it")
    return job


def fill_the_disk(job):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"/somewhere/{job}")


def die(job):
    if job == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return job
