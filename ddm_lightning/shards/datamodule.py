"""The LightningDataModule and its loader: batches of the prepared shards of one cluster, of several, or of all.

The order is one permutation per epoch, or that of ``order`` if images have several shapes; each rank takes its part of
every step. It depends on the shards, the seed and the epoch alone. So a run that stopped on some number of ranks and
threads resumes exactly on any other.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from ddm_lightning.core import remote
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.shards.ahead import FetchedShards
from ddm_lightning.shards.fetch import Origin, tidy
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, columns_in, shard_name
from ddm_lightning.shards.mds import Ids
from ddm_lightning.shards.mosaic import shuffled, window
from ddm_lightning.shards.order import mixed_order
from ddm_lightning.shards.verify import verify_shards

# Batches that each thread gathers ahead.
_BATCHES_PER_THREAD = 2
# Folder of the shards in the cache.
_STORE = "store"
# Share of ``max_cache_bytes`` that is left to the held-out samples.
_HELD_OUT_SHARE = 0.25


@dataclass(eq=False, repr=False)
class ClusterDataModule(L.LightningDataModule):
    """Batches of the MDS shards of some clusters.

    Several clusters are mixed in their natural proportions (every sample once per epoch), as the router and the
    monolith need them. A batch holds every column of fixed size: ``sample_id``, ``cluster`` and ``label`` int64
    ``[b]``, ``text`` float32 ``[b d]``, and all others as stored: ``x_0`` ``[b c h w]``, ``x_0_flipped``,
    ``text_ids``, ``text_tokens`` … The words of captions are skipped. The images of a batch have one shape.

    Batches and their order do not depend on the place of the shards or the number of threads. With another number of
    ranks each step has the same samples. The loaders' ``state_dict`` resumes exactly with any of these.
    """

    shards: str | Path
    """Folder, or URL of a folder, with ``cluster-{k}/train`` and ``cluster-{k}/held-out``.

    Shards behind a URL (``s3://``, ``sftp://``, ``gs://``, ``hf://`` …; ``file://`` for a mounted folder) are fetched
    into the cache. Compressed shards of a folder are decompressed into it."""
    clusters: Sequence[int]
    """The clusters k to load."""
    batch_size: int
    """Samples per optimizer step, over all ranks."""
    seed: int
    """Seed of the sample order."""
    cache: Path
    """Folder of this member alone, for fetched and uncompressed shards."""
    num_workers: int = 0
    """Threads per rank that gather batches ahead; 0 gathers each when it is needed."""
    max_cache_bytes: float | None = None
    """Largest size of the cache; None keeps every shard that was fetched."""
    held_out_clusters: Sequence[int] = ()
    """Clusters whose held-out samples validate."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The manifest's columns: name -> MDS encoding."""
    index_sha256: Mapping[str, str] = field(default_factory=dict)
    """The manifest's hash of each ``index.json``, by ``cluster-{k}/{split}`` or ``cluster-{k}/{bucket}/{split}``."""
    pin_memory: bool = False
    """Whether to page-lock batches, for a GPU."""
    buckets: Sequence[Bucket] = ()
    """The manifest's; a cluster has a folder of each bucket of which it has samples."""

    def __post_init__(self) -> None:
        super().__init__()
        self._training = self._names(self.clusters, TRAIN)
        self._held_out = self._names(self.held_out_clusters, HELD_OUT)
        self._loaders: list[ShardLoader] = []

    def _names(self, clusters: Sequence[int], split: str) -> list[str]:
        """Folders of the shards, those of one bucket after the other."""
        if not self.buckets:
            return [shard_name(k, split) for k in clusters]

        names = []
        for bucket in self.buckets:
            for k in clusters:
                name = shard_name(k, split, bucket.name)
                if name in self.index_sha256:
                    names.append(name)

        return names

    def prepare_data(self) -> None:
        """Check that every local shard is there with its size; hashes are compared when a shard is first needed.

        Raises:
            UserError: a local shard is missing or has another size; the line names it.
        """
        is_url = remote.is_url(self.shards)
        if not is_url and not Path(self.shards).is_dir():
            raise UserError(
                f"{self.shards}: no shards here; copy the run's prepared/shards here, "
                "or set island.shards to their folder or URL"
            )

        for name in (*self._training, *self._held_out):
            sha256 = self.index_sha256.get(name)
            if not is_url:
                verify_shards(Path(self.shards) / name, hashes=False, index_sha256=sha256)

            tidy(self.cache / _STORE / name, sha256)

    def train_dataloader(self) -> ShardLoader:
        """Return shuffled batches of exactly ``batch_size / world_size`` samples.

        Raises:
            UserError: the clusters hold fewer samples than one batch, or the disk or ``max_cache_bytes`` is too small.
        """
        loader = self._loader(self._training, training=True)
        if len(loader.shards) < self.batch_size:
            raise UserError(
                f"{self.shards}: clusters {self.clusters} hold {len(loader.shards)} training samples, "
                f"fewer than the {self.batch_size} of one step; lower global_batch_size or num_clusters"
            )

        return loader

    def val_dataloader(self) -> ShardLoader | list[Any]:
        """Return the held-out samples in a fixed order; an empty list if there are none."""
        if self._held_out:
            return self._loader(self._held_out, training=False)

        return []

    def close(self) -> None:
        """End all threads."""
        for loader in self._loaders:
            loader.close()

    def transfer_batch_to_device(
        self, batch: dict[str, Tensor], device: torch.device, dataloader_idx: int
    ) -> dict[str, Tensor]:
        """Move the columns to ``device``, without Lightning's search for tensors in nested batches."""
        return {name: value.to(device, non_blocking=device.type == "cuda") for name, value in batch.items()}

    def _open(self, names: Sequence[str], training: bool) -> FetchedShards:
        """Open shards at their place or through the cache, if both the disk and ``max_cache_bytes`` have room."""
        share = 1.0
        if self._held_out:
            share = 1 - _HELD_OUT_SHARE if training else _HELD_OUT_SHARE

        max_bytes = self.max_cache_bytes
        if max_bytes is not None:
            max_bytes *= share

        address = str(self.shards).rstrip("/")
        store = self.cache / _STORE
        origins = [Origin(f"{address}/{name}", store / name, self.index_sha256.get(name)) for name in names]
        is_keeper = self.trainer is None or self.trainer.local_rank == 0
        shards = FetchedShards(origins, max_bytes, is_keeper=is_keeper)
        # What fills no batch of its shape is carried over from the windows of the pass before.
        num_windows = min(len(shards.parts), 2) if training else 0
        least = shards.least_bytes(num_windows * sum(map(window, shards.parts)))
        if max_bytes is not None and max_bytes < least:
            raise UserError(
                f"key 'island.cache_gb': {max_bytes / share / 1e9:g} GB are too few for the shards of "
                f"{', '.join(names)} that are read at a time; set {least / share / 1e9:.3g} or more, "
                "or null to keep all shards"
            )

        needed = shards.missing_bytes()
        free = shutil.disk_usage(self.cache).free if needed > 0 else 0
        if needed > free:
            raise UserError(
                f"{self.cache}: the missing shards of {', '.join(names)} need {format_bytes(needed)}, "
                f"but {format_bytes(free)} are free; free some, put run_dir on a larger disk, or set island.cache_gb"
            )

        return shards

    def _loader(self, names: Sequence[str], training: bool) -> ShardLoader:
        """Build this rank's loader, after checking the columns of the shards."""
        rank = 0
        num_ranks = 1
        if self.trainer:
            rank = self.trainer.global_rank
            num_ranks = self.trainer.world_size

        shards = self._open(names, training)
        wanted = [columns_in(self.columns, bucket) for bucket in self.buckets] or [dict(self.columns)]
        for shard in shards.shards:
            found = dict(zip(shard.entry.column_names, shard.entry.column_encodings, strict=True))
            if not any(columns.items() <= found.items() for columns in wanted):
                raise UserError(
                    f"{self.shards}: columns {found} are not the manifest's, {self.columns}; copy both again"
                )

        loader = ShardLoader(
            shards,
            batch_size=self.batch_size // num_ranks,
            seed=self.seed,
            training=training,
            rank=rank,
            num_ranks=num_ranks,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
        )
        self._loaders.append(loader)
        return loader


def steps(order: Ids, rank: int, num_ranks: int, batch_size: int, *, full: bool) -> list[Ids]:
    """Return this rank's samples of each step; step s takes the next ``num_ranks * batch_size`` samples of the order.

    Args:
        order: the rest of the epoch.
        rank: this rank.
        num_ranks: number of ranks.
        batch_size: samples per step on this rank.
        full: whether to skip samples that do not fill a step. Otherwise the first samples are repeated, fewer than
            there are ranks, so that all ranks get equally many.
    """
    at_once = num_ranks * batch_size
    if full:
        order = order[: len(order) // at_once * at_once]
    elif len(order):
        order = np.resize(order, -(-len(order) // num_ranks) * num_ranks)

    mine = order[rank::num_ranks]
    return [mine[start : start + batch_size].copy() for start in range(0, len(mine), batch_size)]


@dataclass(eq=False)
class ShardLoader:
    """Batches of shards, resumable within an epoch on any number of ranks and threads.

    Each iteration is one epoch, and ends the one before it. With images of several shapes, epochs are equally long
    pieces of the endless ``mixed_order``, because a Trainer asks for the length only once. An unreadable shard raises
    ``ShardError``.
    """

    shards: FetchedShards
    batch_size: int
    """Samples per step on this rank."""
    seed: int
    """Seed of the order."""
    training: bool
    """Whether each epoch has its own order and skips, of one shape, samples that do not fill a step of all ranks."""
    rank: int = 0
    """This rank."""
    num_ranks: int = 1
    """Number of ranks."""
    num_workers: int = 0
    """Threads that gather batches ahead; NumPy releases Python's lock meanwhile."""
    pin_memory: bool = False
    """Whether to page-lock batches."""

    def __post_init__(self) -> None:
        self._epoch = -1
        self._sample = 0
        self._resumes = False
        self._running: Generator[dict[str, Tensor]] | None = None

    def __len__(self) -> int:
        """Return the steps of a whole epoch."""
        at_once = self.num_ranks * self.batch_size
        if self.training:
            return len(self.shards) // at_once

        return sum(-(-sum(part) // at_once) for part in self.shards.parts)

    def __iter__(self) -> Generator[dict[str, Tensor]]:
        """Return the batches of the rest of the resumed epoch, or of the next epoch."""
        self.close()
        self._running = self._batches()
        return self._running

    def _batches(self) -> Generator[dict[str, Tensor]]:
        if not self._resumes:
            self._epoch += 1
            self._sample = 0

        self._resumes = False
        # Without it, the threads would page-lock memory through the first GPU, whichever this rank has.
        initializer = partial(torch.cuda.set_device, torch.cuda.current_device()) if self.pin_memory else None
        pool = ThreadPoolExecutor(max(1, self.num_workers), "loader", initializer)
        num_ahead = _BATCHES_PER_THREAD * self.num_workers
        waiting: deque[Future[dict[str, Tensor]]] = deque()
        try:
            for order in self._orders():
                rest = steps(order, self.rank, self.num_ranks, self.batch_size, full=self.training)
                # This ends before the pool does, whose threads may wait for a shard.
                with self.shards.reading(order, self.batch_size * self.num_ranks):
                    for step, ids in enumerate(rest):
                        for later in rest[step + len(waiting) : step + num_ahead]:
                            waiting.append(pool.submit(self._load, later))

                        batch = waiting.popleft().result() if waiting else self._load(ids)
                        self._sample += len(batch["sample_id"]) * self.num_ranks
                        yield batch
                        self.shards.passed(step)
        finally:
            pool.shutdown(cancel_futures=True)

    def _orders(self) -> Iterable[Ids]:
        """Return the samples of the rest of the epoch, of all ranks; no step takes samples of two orders."""
        parts = self.shards.parts
        if not self.training:
            return np.split(np.arange(len(self.shards)), np.cumsum([*map(sum, parts)]))[:-1]
        if len(parts) == 1:
            return [shuffled(parts[0], self.seed, self._epoch)[self._sample :]]

        at_once = self.num_ranks * self.batch_size
        first = self._epoch * len(self)
        return mixed_order(parts, at_once, self.seed, first + self._sample // at_once, first + len(self))

    def _load(self, ids: Ids) -> dict[str, Tensor]:
        batch = self.shards.take(ids)
        if self.pin_memory:
            return {name: values.pin_memory() for name, values in batch.items()}

        return batch

    def close(self) -> None:
        """End the current epoch and its threads."""
        if self._running is not None:
            self._running.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, for ``load_state_dict`` on any number of ranks and threads."""
        return {"epoch": self._epoch, "sample_in_epoch": self._sample, "shuffle_seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue where ``state`` was taken."""
        self._epoch = state["epoch"]
        self._sample = state["sample_in_epoch"]
        self.seed = state["shuffle_seed"]
        self._resumes = self._epoch >= 0
