"""What would stop a training after hours, found before its first step. Each refusal is one line with its remedy."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import amount
from ddm_lightning.shards.order import Ranks
from ddm_lightning.shards.shared_memory import SHARED_MEMORY

# Batches that wait in a worker's queue (DataLoader's prefetch_factor) and the one in use.
_BATCHES_A_WORKER = 3
_ID_BYTES = 8


def rank_batch_size(batch_size: int, ranks: Ranks) -> int:
    """Samples a step on one rank.

    Raises:
        UserError: the samples of a step cannot be shared out equally.
    """
    if batch_size % ranks.num_ranks:
        raise UserError(
            f"{batch_size} samples a step cannot be shared equally by {ranks.num_ranks} devices; "
            "make train.global_batch_size a multiple of the devices (for experts: of devices x clusters), "
            "or change island.devices"
        )
    return batch_size // ranks.num_ranks


def check_samples(where: str, num_samples: int, batch_size: int) -> None:
    """Refuse shards that hold less than one step.

    Raises:
        UserError: fewer samples than ``batch_size``, the samples a step of all ranks.
    """
    if num_samples < batch_size:
        raise UserError(
            f"{where} hold {num_samples} training samples, fewer than the {batch_size} of one step; "
            "lower global_batch_size or num_clusters"
        )


def check_nodes(num_canonical_nodes: int, num_nodes: int) -> None:
    """Refuse a partition of the shards in which each node would need all of them by accident.

    Raises:
        UserError: neither number divides the other.
    """
    if num_canonical_nodes < 1 or (num_canonical_nodes % num_nodes and num_nodes % num_canonical_nodes):
        raise UserError(
            f"num_canonical_nodes = {num_canonical_nodes} does not fit {num_nodes} nodes: one has to divide the other; "
            f"set it to a multiple of {num_nodes}"
        )


def check_disk(folder: Path, num_bytes: int, what: str) -> None:
    """Refuse to fill the disk on which ``folder`` lies.

    Raises:
        UserError: fewer than ``num_bytes`` are free there.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"{folder}: {what} need {amount(num_bytes)}, but {amount(free)} are free on this disk; "
            "free some, or put run_dir on a larger disk"
        )


def shared_memory_bytes(num_samples: int, batch_bytes: int, num_workers: int, ranks_per_node: int) -> int:
    """What one node's ranks take of shared memory: the epoch's order once, and the batches that workers hand over."""
    return _ID_BYTES * num_samples + ranks_per_node * num_workers * _BATCHES_A_WORKER * batch_bytes


def check_shared_memory(num_bytes: int) -> None:
    """Refuse what would end in a bus error.

    Raises:
        UserError: fewer than ``num_bytes`` are free in ``/dev/shm``.
    """
    if not SHARED_MEMORY.is_dir():
        return  # no Linux: shared memory is bounded by memory alone
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < num_bytes:
        raise UserError(
            f"{SHARED_MEMORY}: loading needs {amount(num_bytes)} of shared memory, but {amount(free)} are free; "
            "lower island.num_workers, or give the container more (docker run --shm-size, mount -o remount,size=...)"
        )
