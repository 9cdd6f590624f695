"""Workers copy no page-locked memory, which a fork copies at once and for each of them: a checkpoint of 10 GB each."""

import ctypes
import multiprocessing
import struct
import sys
from pathlib import Path

import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import copy_run
from training.short_fits import fit

from ddm_lightning.training import checkpoint
from ddm_lightning.training.callbacks import MissedValidation

pytestmark = WARNINGS
BALLAST_BYTES = 134_217_728
_SETUP, _REGISTER, _BUFFERS = 425, 427, 0


@pytest.fixture
def page_lock():
    """Locks memory as CUDA's driver does: a buffer registered with io_uring is pinned for long, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(_SETUP, 8, ctypes.create_string_buffer(120)) if sys.platform == "linux" else -1
    if ring < 0:
        pytest.skip("io_uring is not permitted here, so no memory can be pinned as a driver does")

    def lock(address, num_bytes):
        buffers = ctypes.create_string_buffer(struct.pack("QQ", address, num_bytes))
        if libc.syscall(_REGISTER, ring, _BUFFERS, buffers, 1):
            pytest.skip(f"io_uring may not pin {num_bytes} bytes here: errno {ctypes.get_errno()}")

    yield lock
    libc.close(ring)


def private_bytes(worker):
    """Memory that no other process shares."""
    lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def test_workers_share_nothing_with_a_page_locked_checkpoint(finished, tmp_path, monkeypatch, page_lock):
    """A resumed training saves at steps 24 and 32 and then validates; epochs of five steps end in between."""
    found, start, record = [], checkpoint.CheckpointWriter.start, MissedValidation.on_validation_end
    earlier = multiprocessing.active_children()  # of other tests, which may still be ending
    ballast = torch.zeros(BALLAST_BYTES, dtype=torch.uint8)
    monkeypatch.setattr("torch.cuda._pin_memory_utils.pin_memory", page_lock)
    monkeypatch.setattr("torch.cuda._pin_memory_utils.unpin_memory", lambda _: None)

    def start_pinned(self, *arguments):
        self._stager.pin_memory, self._stager.pin_memory_min_bytes = True, BALLAST_BYTES
        self.ballast = self._stager.stage(ballast)
        start(self, *arguments)

    def look(self, trainer, module):
        own = [worker for worker in multiprocessing.active_children() if worker not in earlier]
        found.append([private_bytes(worker) for worker in own])
        record(self, trainer, module)

    monkeypatch.setattr(checkpoint.CheckpointWriter, "start", start_pinned)
    monkeypatch.setattr(MissedValidation, "on_validation_end", look)
    run = copy_run(finished, tmp_path / "run")
    assert fit(run, "island.num_workers=2", "expert.train.max_steps=32") == 0
    assert [len(workers) for workers in found] == [4, 4]
    assert max(map(max, found)) < BALLAST_BYTES / 2
