"""The LightningDataModule and its loader: batches of the prepared shards of one cluster, of several, or of all.

The order is one permutation per epoch; each rank takes its part of every step. It depends on the shards, the seed and
the epoch alone. So a run that stopped on some number of ranks and workers resumes exactly on any other.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.shards.fetch import FetchedShards, Origin
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, shard_name
from ddm_lightning.shards.mosaic import shuffled
from ddm_lightning.shards.verify import remove_damaged, verify_shards

SHARED_MEMORY = Path("/dev/shm")
# Places of one step's samples, and the shards to fetch ahead.
_Step = tuple[Int[np.ndarray, "m"], list[int]]

# Batches that wait in a worker's queue (DataLoader's prefetch_factor) and the one in use.
_BATCHES_PER_WORKER = 3


class ClusterDataModule(L.LightningDataModule):
    """Batches of the MDS shards of some clusters.

    Several clusters are mixed in their natural proportions (every sample once per epoch), as the router and the
    monolith need them. A batch holds every column of fixed size: ``sample_id``, ``cluster`` and ``label`` int64
    ``[b]``, ``text`` float32 ``[b d]``, and all others as stored: ``x_0`` ``[b c h w]``, ``x_0_flipped``,
    ``text_ids``, ``text_tokens`` … Captions are skipped.

    Batches and their order do not depend on the place of the shards or the number of workers. With another number of
    ranks each step has the same samples. The loaders' ``state_dict`` resumes exactly with any of these.

    Args:
        shards: folder, or URL of a folder, with ``cluster-{k}/train`` and ``cluster-{k}/held-out``. Shards behind a URL
            (``s3://``, ``sftp://``, ``gs://``, ``hf://`` …; ``file://`` for a mounted folder) are fetched as needed;
            compressed ones of a folder are decompressed before training.
        clusters: the clusters k to load.
        batch_size: samples per optimizer step, over all ranks.
        seed: of the sample order.
        cache: folder of this member alone, for fetched and uncompressed shards.
        num_workers: data-loading processes per rank.
        held_out_clusters: clusters whose held-out samples validate.
        columns: the manifest's columns: name -> MDS encoding.
        index_sha256: the manifest's hash of each ``index.json``, by ``cluster-{k}/{split}``.
        pin_memory: whether to page-lock training batches, for a GPU.
    """

    def __init__(
        self,
        shards: str | Path,
        clusters: Sequence[int],
        batch_size: int,
        seed: int,
        cache: Path,
        num_workers: int = 0,
        held_out_clusters: Sequence[int] = (),
        columns: Mapping[str, str] | None = None,
        index_sha256: Mapping[str, str] | None = None,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.shards = str(shards)
        self.clusters = list(clusters)
        self.batch_size = batch_size
        self.seed = seed
        self.cache = cache
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.columns = dict(columns or {})
        self.index_sha256 = dict(index_sha256 or {})
        self._training = [shard_name(k, TRAIN) for k in self.clusters]
        self.held_out_clusters = list(held_out_clusters)
        self._held_out = [shard_name(k, HELD_OUT) for k in self.held_out_clusters]
        self._loaders: list[ShardLoader] = []

    def prepare_data(self) -> None:
        """Check every shard on this machine against its index; remove damaged and outdated ones from the cache.

        Raises:
            UserError: a local shard is missing, truncated or fails its hash; the line names it.
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
                verify_shards(Path(self.shards) / name, index_sha256=sha256)
            if (self._store(name) / "index.json").exists():
                remove_damaged(self._store(name), index_sha256=sha256)
            if not is_url:
                packed = self._open([name])
                for shard in range(len(packed.files)):
                    packed.fetch(shard)

    def train_dataloader(self) -> ShardLoader:
        """Return shuffled batches of exactly ``batch_size / world_size`` samples.

        Raises:
            UserError: the clusters hold fewer samples than one batch, the ranks cannot share a batch equally, or
                the disk or the shared memory is too small.
        """
        loader = self._loader(self._training, training=True)
        if len(loader.shards) < self.batch_size:
            raise UserError(
                f"{self.shards}: clusters {self.clusters} hold {len(loader.shards)} training samples, "
                f"fewer than the {self.batch_size} of one step; lower global_batch_size or num_clusters"
            )
        return loader

    def val_dataloader(self) -> ShardLoader | list[Any]:
        """Return the held-out samples in a fixed order; an empty list if there are none.

        Starts its workers now, because a later fork would copy page-locked memory, such as the first checkpoint's.
        """
        if not self._held_out:
            return []
        loader = self._loader(self._held_out, training=False)
        loader.start_workers()
        return loader

    def close(self) -> None:
        """End all workers."""
        for loader in self._loaders:
            loader.end_workers()

    def transfer_batch_to_device(
        self, batch: dict[str, Tensor], device: torch.device, dataloader_idx: int
    ) -> dict[str, Tensor]:
        """Move the columns to ``device``, without Lightning's search for tensors in nested batches."""
        return {name: value.to(device, non_blocking=device.type == "cuda") for name, value in batch.items()}

    def training_folders(self) -> list[Path]:
        """Return the folders of the uncompressed training shards on this machine; call ``prepare_data`` before."""
        return [self._origin(name).folder for name in self._training]

    def _store(self, name: str) -> Path:
        return self.cache / "store" / name

    def _origin(self, name: str) -> Origin:
        return Origin(f"{self.shards.rstrip('/')}/{name}", self._store(name), self.index_sha256.get(name))

    def _open(self, names: Sequence[str]) -> FetchedShards:
        shards = FetchedShards([self._origin(name) for name in names])
        needed = shards.missing_bytes()
        free = shutil.disk_usage(self.cache).free if needed else needed
        if needed > free:
            raise UserError(
                f"{self.cache}: the missing shards of {', '.join(names)} need {format_bytes(needed)}, "
                f"but {format_bytes(free)} are free; free some, or put run_dir on a larger disk"
            )
        return shards

    def _loader(self, names: Sequence[str], training: bool) -> ShardLoader:
        rank, num_ranks = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        if self.batch_size % num_ranks:
            raise UserError(
                f"{self.batch_size} samples per step cannot be shared equally by {num_ranks} devices; "
                "make train.global_batch_size a multiple of the devices (experts: of devices x clusters), "
                "or change island.devices or island.nodes"
            )
        batch_size = self.batch_size // num_ranks
        shards = self._open(names)
        found = {column.name: column.encoding for column in shards.layout.columns}
        if not self.columns.items() <= found.items():
            raise UserError(f"{self.shards}: columns {found} are not the manifest's, {self.columns}; copy both again")
        waiting = ranks_here * self.num_workers * _BATCHES_PER_WORKER
        _check_shared_memory(waiting * batch_size * shards.layout.num_fixed_bytes)
        settings: Any = {"rank": rank, "num_ranks": num_ranks, "num_workers": self.num_workers}
        # Validation needs no page-locked batches, and their thread would run when the training's workers are forked.
        settings |= {"batch_size": batch_size, "seed": self.seed, "pin_memory": self.pin_memory and training}
        self._loaders.append(ShardLoader(shards, training=training, **settings))
        return self._loaders[-1]


def _check_shared_memory(num_bytes: int) -> None:
    """Refuse to start workers that would die of a bus error; skipped without ``/dev/shm``, which Linux has."""
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else num_bytes
    if free < num_bytes:
        raise UserError(
            f"{SHARED_MEMORY}: loading needs {format_bytes(num_bytes)} of shared memory, "
            f"but {format_bytes(free)} are free; "
            "lower island.num_workers, or give the container more (docker run --shm-size)"
        )


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
        num_ranks: number of ranks.
        batch_size: samples per step on this rank.
        full: whether to skip samples that do not fill a step. Otherwise the first samples are repeated, fewer than
            there are ranks, so that all ranks get equally many.
    """
    if full:
        order = order[: len(order) // (num_ranks * batch_size) * num_ranks * batch_size]
    elif len(order):
        order = np.resize(order, -(-len(order) // num_ranks) * num_ranks)
    mine = order[rank::num_ranks]
    return [mine[start : start + batch_size].copy() for start in range(0, len(mine), batch_size)]


def _end_with_parent(_worker: int) -> None:
    """End a worker whose parent was killed: waiting for a shard, it would hold the member's lock for ever."""
    parent = multiprocessing.parent_process()  # of a forkserver's child, this is not the process that forked it
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class _Batches(Dataset[dict[str, Tensor]]):
    def __init__(self, shards: FetchedShards) -> None:
        self.shards = shards

    def __getitem__(self, step: _Step) -> dict[str, Tensor]:
        ids, ahead = step
        self.shards.fetch_ahead(ahead)
        return self.shards.take(ids)


class ShardLoader:
    """Batches of shards, resumable within an epoch on any number of ranks and workers.

    Each iteration is one epoch. Errors of a worker end all workers and are raised as ``ShardError``.

    Args:
        shards: the samples.
        batch_size: samples per step on this rank.
        seed: seed of the order.
        training: whether each epoch has its own order and skips samples that do not fill a step of all ranks.
        rank: this rank.
        num_ranks: number of all.
        num_workers: data-loading processes; 0 loads in this one.
        pin_memory: whether to page-lock batches.
    """

    def __init__(
        self,
        shards: FetchedShards,
        *,
        batch_size: int,
        seed: int,
        training: bool,
        rank: int = 0,
        num_ranks: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.shards = shards
        self.samples_per_rank = batch_size
        self.seed = seed
        self.training = training
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self._epoch = -1
        self._sample = 0
        self._resumed: Mapping[str, Any] | None = None
        self._rest: list[_Step] = []
        # The only references to the workers, which end with the last one.
        self._loader: DataLoader[dict[str, Tensor]] | None = None
        self._batches: Iterator[dict[str, Tensor]] | None = None

    def __len__(self) -> int:
        """Return the steps of a whole epoch."""
        return num_steps(len(self.shards), self.num_ranks, self.samples_per_rank, full=self.training)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the rest of the resumed epoch, or the next epoch."""
        self._epoch += 1
        self._sample = 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed["epoch"] >= self._epoch:
            self._epoch = int(resumed["epoch"])
            self._sample = int(resumed["sample_in_epoch"])
            self.seed = resumed["shuffle_seed"]
        order = shuffled(self.shards.sizes, self.seed, self._epoch) if self.training else np.arange(len(self.shards))
        rest = steps(order[self._sample :], self.rank, self.num_ranks, self.samples_per_rank, full=self.training)
        missing = self.shards.missing(np.concatenate(rest)) if rest else []
        # The first step of each worker carries the list.
        num_told = max(1, self.num_workers)
        self._rest[:] = [(ids, missing if step < num_told else []) for step, ids in enumerate(rest)]
        try:
            self._begin()
            while self._batches is not None and (batch := next(self._batches, None)) is not None:
                self._sample += len(batch["sample_id"]) * self.num_ranks
                yield batch
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # which refer to the workers, too
            self.end_workers()
            raise
        finally:
            self.shards.stop_fetching()

    def _begin(self) -> None:
        if self._loader is None:
            self._loader = DataLoader(
                _Batches(self.shards),
                batch_size=None,
                sampler=self._rest,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                worker_init_fn=_end_with_parent,
                persistent_workers=self.num_workers > 0,
            )
        self._batches = iter(self._loader)

    def start_workers(self) -> None:
        """Start the workers before the first batch is wanted."""
        if self.num_workers:
            self._begin()

    def end_workers(self) -> None:
        """End the workers now, if there are any."""
        self._loader = None
        self._batches = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch, for ``load_state_dict`` on any number of ranks and workers."""
        if self._resumed is not None:
            return dict(self._resumed)
        return {"epoch": self._epoch, "sample_in_epoch": self._sample, "shuffle_seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue where ``state`` was taken."""
        self._resumed = dict(state)
