"""The data loader: batches gathered from MDS shards, in the order of ``shards.order``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jaxtyping import Int
from streaming.base.format import reader_from_json
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddm_lightning.core.errors import first_line
from ddm_lightning.shards.fetch import FetchedShards, Origin
from ddm_lightning.shards.mds import ShardFile, Shards
from ddm_lightning.shards.order import Ranks, epoch_order, num_steps, steps
from ddm_lightning.shards.verify import read_index, unreadable
from ddm_lightning.shards.workers import end_with_parent

# Places of one step's samples, and the shards to fetch ahead.
_Step = tuple[Int[np.ndarray, "m"], list[int]]


def is_packed(folder: Path) -> bool:
    """Whether the shards of an MDS folder are compressed."""
    return any(info["zip_data"] for info in read_index(folder))


def open_shards(folders: Sequence[Path]) -> Shards:
    """Open the uncompressed shards of some MDS folders, one after the other.

    Raises:
        UserError: they cannot be read together.
    """
    return Shards([ShardFile.of(folder, info) for folder in folders for info in read_index(folder)])


def read_samples(folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield every sample of some MDS folders with all its columns, captions included."""
    for folder in folders:
        for info in read_index(folder):
            with TemporaryDirectory() as scratch:
                if info["zip_data"]:
                    Origin(str(folder), Path(scratch)).fetch(info, wait=True)
                yield from reader_from_json(scratch if info["zip_data"] else str(folder), None, info)


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


class _Steps:
    """The rest of this rank's epoch, step by step; its length is that of a whole epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.table: Int[np.ndarray, "s batch"] = np.empty((0, 0), dtype=np.int64)
        self.missing: list[int] = []
        self.num_told = 0
        """Steps, one per worker, that carry the list of missing shards."""

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[_Step]:
        for step, ids in enumerate(self.table):
            left = ids[ids >= 0]
            if len(left):
                yield left, self.missing if step < self.num_told else []


class LocalLoader(DataLoader[dict[str, Tensor]]):
    """Batches of shards, resumable within an epoch on any number of ranks and workers.

    Each iteration is one epoch. Errors of a worker end all workers and are raised as ``ShardError``.

    Args:
        shards: the samples.
        ranks: this rank among all.
        batch_size: samples per step on this rank.
        seed: of the order.
        shuffle: whether each epoch has its own order.
        full: whether to skip samples that do not fill a step of all ranks.
        settings: of DataLoader.
    """

    def __init__(
        self, shards: Shards, *, ranks: Ranks, batch_size: int, seed: int, shuffle: bool, full: bool, **settings: Any
    ) -> None:
        self._steps = _Steps(num_steps(len(shards), ranks.num_ranks, batch_size, full=full))
        # Workers that wait for a download would outlive a killed parent and hold the member's lock.
        watched = partial(end_with_parent, os.getpid())
        super().__init__(_Batches(shards), sampler=self._steps, batch_size=None, worker_init_fn=watched, **settings)
        self.shards, self.ranks, self.samples_a_rank = shards, ranks, batch_size
        self.seed, self.shuffle, self.full = seed, shuffle, full
        self._epoch, self._sample = -1, 0
        self._resumed: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]  # a generator, for the clean-up
        """Yield the rest of the resumed epoch, or the next epoch."""
        self._epoch, self._sample = self._epoch + 1, 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["epoch"] >= self._epoch:
            self._epoch, self._sample = int(resumed["epoch"]), int(resumed["sample_in_epoch"])
            self.seed = resumed["shuffle_seed"]
        order = epoch_order(self.shards.sizes, seed=self.seed, epoch=self._epoch, shuffle=self.shuffle)
        table = steps(order[self._sample :], self.ranks, self.samples_a_rank, full=self.full)
        self._steps.table = table[self.ranks.node, self.ranks.rank_of_node].copy()
        if isinstance(self.shards, FetchedShards):
            self._steps.missing = self.shards.missing(self._steps.table[self._steps.table >= 0])
            self._steps.num_told = max(1, self.num_workers)
        try:
            for batch in super().__iter__():
                self._sample += len(batch["sample_id"]) * self.ranks.num_ranks
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
