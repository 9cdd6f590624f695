"""The data loader: batches gathered from MDS shards, in an order that any number of ranks and workers shares.

The order is one permutation per epoch; each rank takes its part of every step. It depends on the shards, the seed and
the epoch alone. So a run that stopped on some number of ranks and workers resumes exactly on any other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int
from streaming.base.shuffle import get_shuffle
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddm_lightning.core.errors import first_line
from ddm_lightning.core.processes import on_orphaned
from ddm_lightning.shards.fetch import FetchedShards
from ddm_lightning.shards.mds import Shards
from ddm_lightning.shards.verify import unreadable

# Fewest samples among which a shard's samples are scattered: they are fetched before the first step of an epoch. Four
# times the largest shard is the lower limit, because a shard larger than a block mixes with no other.
_MIN_BLOCK = 1 << 18

# Places of one step's samples, and the shards to fetch ahead.
_Step = tuple[Int[np.ndarray, "m"], list[int]]


def epoch_order(shard_sizes: Sequence[int], *, seed: int, epoch: int, shuffle: bool) -> Int[np.ndarray, "n"]:
    """Return every sample once, by its position in the concatenated shards; shuffled with Streaming's ``py1e``."""
    if not shuffle:
        return np.arange(np.sum(shard_sizes), dtype=np.int64)
    sizes = np.asarray(shard_sizes, dtype=np.int64)
    # One canonical node: a permutation of all shards, whatever the number of nodes.
    return get_shuffle("py1e", sizes, 1, seed, epoch, max(_MIN_BLOCK, 4 * int(sizes.max())))


def num_steps(num_samples: int, num_ranks: int, batch_size: int, *, full: bool) -> int:
    """Return the number of steps that ``steps`` makes of ``num_samples``."""
    if full:
        return num_samples // (num_ranks * batch_size)
    return math.ceil(math.ceil(num_samples / num_ranks) / batch_size)


def steps(
    order: Int[np.ndarray, "n"], rank: int, num_ranks: int, batch_size: int, *, full: bool
) -> list[Int[np.ndarray, "_"]]:
    """Return this rank's samples of each step; step s takes the next ``num_ranks * batch_size`` samples of the order.

    Args:
        order: the rest of the epoch.
        rank: this rank.
        num_ranks: number of all.
        batch_size: samples per step on this rank.
        full: whether to skip samples that do not fill a step. Otherwise all ranks still get equally many samples,
            because they wait for one another: the first samples are repeated, fewer of them than there are ranks.
    """
    if full:
        order = order[: len(order) // (num_ranks * batch_size) * num_ranks * batch_size]
    elif len(order):
        order = np.resize(order, -(-len(order) // num_ranks) * num_ranks)
    mine = order[rank::num_ranks]
    return [mine[start : start + batch_size].copy() for start in range(0, len(mine), batch_size)]


def _end_with_parent(parent: int, _worker: int) -> None:
    """End a worker whose parent was killed: waiting for a shard, it would hold the member's lock for ever."""
    on_orphaned(parent)


class _Batches(Dataset[dict[str, Tensor]]):
    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def __getitem__(self, step: _Step) -> dict[str, Tensor]:
        ids, ahead = step
        try:
            if ahead and isinstance(self.shards, FetchedShards):
                self.shards.fetch_ahead(ahead)
            return self.shards.take(ids)
        except (OSError, ValueError) as error:
            raise unreadable(first_line(error)) from error


class ShardLoader(DataLoader[dict[str, Tensor]]):
    """Batches of shards, resumable within an epoch on any number of ranks and workers.

    Each iteration is one epoch. Errors of a worker end all workers and are raised as ``ShardError``.

    Args:
        shards: the samples.
        batch_size: samples per step on this rank.
        seed: seed of the order.
        training: whether each epoch has its own order and skips samples that do not fill a step of all ranks.
        rank: this rank.
        num_ranks: number of all.
        settings: passed to DataLoader.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        batch_size: int,
        seed: int,
        training: bool,
        rank: int = 0,
        num_ranks: int = 1,
        **settings: Any,
    ) -> None:
        self._rest: list[_Step] = []
        watched = partial(_end_with_parent, os.getpid())
        settings = {"worker_init_fn": watched, "persistent_workers": settings.get("num_workers", 0) > 0, **settings}
        super().__init__(_Batches(shards), sampler=self._rest, batch_size=None, **settings)
        self.shards, self.rank, self.num_ranks, self.samples_per_rank = shards, rank, num_ranks, batch_size
        self.seed, self.training = seed, training
        self._epoch, self._sample = -1, 0
        self._resumed: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        """Return the steps of a whole epoch."""
        return num_steps(len(self.shards), self.num_ranks, self.samples_per_rank, full=self.training)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]  # a generator, for the clean-up
        """Yield the rest of the resumed epoch, or the next epoch."""
        self._epoch, self._sample = self._epoch + 1, 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["epoch"] >= self._epoch:
            self._epoch, self._sample = int(resumed["epoch"]), int(resumed["sample_in_epoch"])
            self.seed = resumed["shuffle_seed"]
        order = epoch_order(self.shards.sizes, seed=self.seed, epoch=self._epoch, shuffle=self.training)
        rest = steps(order[self._sample :], self.rank, self.num_ranks, self.samples_per_rank, full=self.training)
        missing = self.shards.missing(np.concatenate(rest)) if isinstance(self.shards, FetchedShards) and rest else []
        # The first step of each worker carries the list.
        num_told = max(1, self.num_workers)
        self._rest[:] = [(ids, missing if step < num_told else []) for step, ids in enumerate(rest)]
        try:
            for batch in super().__iter__():
                self._sample += len(batch["sample_id"]) * self.num_ranks
                yield batch
        except Exception:
            # The traceback would keep persistent workers until the garbage collector waits seconds for them.
            if self._iterator is not None:
                self._iterator._shutdown_workers()  # type: ignore[attr-defined]  # exists with workers only
                self._iterator = None
            raise
        finally:
            if isinstance(self.shards, FetchedShards):
                self.shards.stop_fetching()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, for ``load_state_dict`` on any number of ranks and workers."""
        if self._resumed is not None:
            return dict(self._resumed)
        return {"epoch": self._epoch, "sample_in_epoch": self._sample, "shuffle_seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue where ``state`` was taken."""
        self._resumed = dict(state)
