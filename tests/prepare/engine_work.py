"""What other processes do in tests of the engine; they import it from here."""

import errno
import os
import signal
import time

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


def die_at_first(marker):
    """Kill the process unless an earlier one left the marker."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return marker.name


def place(job):
    """Return the GPUs that this process sees, the node it runs on, and the process."""
    import ray

    time.sleep(1)
    return os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_runtime_context().get_node_id(), os.getpid()
