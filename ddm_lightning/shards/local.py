"""The ``local`` back end: MDS shards on this machine, read directly. No shared memory, no locks, no threads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from streaming.base.compression import decompress
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddm_lightning.core.schema import first_line
from ddm_lightning.shards.mds import ShardFile, Shards
from ddm_lightning.shards.order import Ranks, epoch_order, num_steps, steps
from ddm_lightning.shards.preflight import check_disk
from ddm_lightning.shards.verify import ShardError, read_index, remove_damaged, unreadable
from ddm_lightning.shards.workers import as_it_is, workers_end_with_an_error

_REMEDY = "delete the run's prepared/shards and run prepare again, or copy them again from where that was done"
# Nothing is evicted, and the state has to fit the streaming back end's.
_NODES_AT_FIRST = 1


def is_packed(folder: Path) -> bool:
    """Whether the shards of an MDS folder are compressed."""
    return any(info["zip_data"] for info in read_index(folder))


def open_shards(folders: Sequence[Path]) -> Shards:
    """The uncompressed shards of some MDS folders, one behind the other.

    Raises:
        UserError: they cannot be read together.
    """
    return Shards([ShardFile.of(folder, info) for folder in folders for info in read_index(folder)])


def unpack(folder: Path, store: Path, *, index_sha256: str | None = None) -> None:
    """Unpack the compressed shards of ``folder`` to ``store``; what was unpacked before and is whole stays.

    Raises:
        UserError: the disk is too small.
        ShardError: a shard cannot be unpacked.
    """
    if (store / "index.json").exists():
        remove_damaged(store, index_sha256=index_sha256)
    store.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / "index.json", store / "index.json")
    missing = [info for info in read_index(folder) if not (store / info["raw_data"]["basename"]).exists()]
    check_disk(store, sum(info["raw_data"]["bytes"] for info in missing), f"the unpacked shards of {folder}")
    for info in missing:
        packed, raw = folder / info["zip_data"]["basename"], store / info["raw_data"]["basename"]
        partial = raw.with_name(f"{raw.name}.tmp")
        try:
            partial.write_bytes(decompress(info["compression"], packed.read_bytes()))
        except Exception as error:  # each compression has errors of its own
            partial.unlink(missing_ok=True)
            raise ShardError(f"{packed}: cannot be unpacked: {first_line(error)}; {_REMEDY}") from error
        partial.replace(raw)


class _Batches(Dataset[dict[str, Tensor]]):
    """Batches by the positions of their samples."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def __getitem__(self, ids: Int[np.ndarray, "m"]) -> dict[str, Tensor]:
        try:
            return self.shards.take(ids)
        except (OSError, ValueError) as error:
            raise unreadable(first_line(error)) from error


class _Steps:
    """What is left of this rank's epoch, a step after the other; its length is that of a whole epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.table: Int[np.ndarray, "s batch"] = np.empty((0, 0), dtype=np.int64)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Int[np.ndarray, "m"]]:
        for ids in self.table:
            left = ids[ids >= 0]
            if len(left):
                yield left


class LocalLoader(DataLoader[dict[str, Tensor]]):
    """Batches of shards on this machine, resumable in the middle of an epoch, also on another number of ranks.

    Each iteration is an epoch. The state is the one that a StreamingDataLoader of the ``streaming`` back end has, and
    either goes on with the other's.
    """

    def __init__(
        self,
        shards: Shards,
        *,
        ranks: Ranks,
        batch_size: int,
        seed: int,
        shuffle: bool,
        full: bool,
        num_canonical_nodes: int = 1,
        **settings: Any,
    ) -> None:
        length = num_steps(len(shards), ranks.num_ranks, batch_size, full=full)
        self._steps = _Steps(length)
        super().__init__(_Batches(shards), sampler=self._steps, batch_size=None, collate_fn=as_it_is, **settings)
        self.shards, self.ranks, self.samples_a_rank = shards, ranks, batch_size
        self.seed, self.shuffle, self.full, self.num_canonical_nodes = seed, shuffle, full, num_canonical_nodes
        self._epoch, self._sample = -1, 0
        self._resumed: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]  # as StreamingDataLoader does
        """What is left of the epoch resumed in, or the next one."""
        self._epoch, self._sample = self._epoch + 1, 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["epoch"] >= self._epoch:
            self._epoch, self._sample = int(resumed["epoch"]), int(resumed["sample_in_epoch"])
            self.seed, self.num_canonical_nodes = resumed["shuffle_seed"], resumed["num_canonical_nodes"]
        order = epoch_order(
            self.shards.sizes,
            seed=self.seed,
            epoch=self._epoch,
            shuffle=self.shuffle,
            num_canonical_nodes=self.num_canonical_nodes,
        )
        table = steps(order[self._sample :], self.ranks, self.samples_a_rank, full=self.full)
        self._steps.table = table[self.ranks.node, self.ranks.rank_of_node].copy()
        with workers_end_with_an_error(self):
            for batch in super().__iter__():
                self._sample += len(batch["sample_id"]) * self.ranks.num_ranks
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch is, for ``load_state_dict`` on any number of ranks and workers."""
        if self._resumed is not None:
            return dict(self._resumed)
        return {
            "epoch": self._epoch,
            "sample_in_epoch": self._sample,
            "num_canonical_nodes": self.num_canonical_nodes,
            "shuffle_seed": self.seed,
            "initial_physical_nodes": _NODES_AT_FIRST,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where ``state`` was taken."""
        self._resumed = dict(state)
