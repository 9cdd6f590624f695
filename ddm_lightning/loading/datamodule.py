"""The LightningDataModule: prepared shards of one cluster, of several, or of all, as batches."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from streaming import StreamingDataLoader
from torch import Tensor

from ddm_lightning.errors import UserError
from ddm_lightning.files import sha256_file
from ddm_lightning.loading.streaming import SafeStreamingDataset, open_streams, set_rank_environment
from ddm_lightning.prepare.manifest import HELD_OUT, TRAIN
from ddm_lightning.prepare.verify import remove_damaged, verify_shards


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack MDS samples into tensors.

    Returns:
        ``x_0`` as stored (``[b c h w]``), ``sample_id`` int64 ``[b]``, ``cluster`` int64 ``[b]``, ``label``
        int64 ``[b]`` and, where captions were encoded, ``text`` float32 ``[b d]``.
    """
    # sample_id goes first: StreamingDataLoader counts samples by the first value of a batch.
    batch = {
        name: torch.tensor([int(sample[name]) for sample in samples], dtype=torch.int64)
        for name in ("sample_id", "cluster", "label")
    }
    batch["x_0"] = torch.from_numpy(np.stack([sample["x_0"] for sample in samples]))
    if "text" in samples[0]:
        batch["text"] = torch.from_numpy(np.stack([sample["text"] for sample in samples])).float()
    return batch


class ClusterDataModule(L.LightningDataModule):
    """Streams the MDS shards of some clusters.

    Several clusters are mixed in their natural proportions (every sample once an epoch), which is what
    the router and the monolith train on.

    Args:
        shards: folder, or URL of a folder, that holds ``cluster-{k}/train`` and ``cluster-{k}/held-out``. What a
            URL names (``s3://``, ``sftp://`` …; ``file://`` for a mounted folder) is fetched as it is needed.
        clusters: the clusters k to stream.
        batch_size: samples an optimizer step, over all ranks.
        seed: of the sample order.
        cache: folder of this member alone, for shards fetched from a URL.
        num_workers: data-loading processes of one rank.
        held_out_clusters: clusters whose held-out samples are validated on (those that have any).
        index_sha256: what the manifest says of each ``index.json``, by ``cluster-{k}/{split}``.
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
        index_sha256: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.shards = str(shards)
        self.clusters = list(clusters)
        self.batch_size = batch_size
        self.seed = seed
        self.cache = cache
        self.num_workers = num_workers
        self.held_out_clusters = list(held_out_clusters)
        self.index_sha256 = dict(index_sha256 or {})
        self._start = uuid.uuid4().hex[:8]

    def prepare_data(self) -> None:
        """Check every shard that lies here against its index before anything trains on it.

        Of fetched ones, those that differ are removed, and so is what was fetched for an earlier preparation:
        Streaming checks what it fetches, and never again.

        Raises:
            UserError: a local shard is missing, truncated or fails its hash; the line names it.
        """
        if not self._is_remote() and not Path(self.shards).is_dir():
            raise UserError(
                f"{self.shards}: no shards here; copy the run's prepared/shards here, "
                "or set island.shards to the folder or URL where they lie"
            )
        for view in self.cache.glob("view-*"):
            shutil.rmtree(view)  # of a killed process: the member's lock says that no other is alive
        for split, clusters in ((TRAIN, self.clusters), (HELD_OUT, self.held_out_clusters)):
            for cluster in clusters:
                name = f"cluster-{cluster}/{split}"
                if not self._is_remote():
                    verify_shards(Path(self.shards) / name, index_sha256=self.index_sha256.get(name))
                elif (self._store(name) / "index.json").exists():
                    remove_damaged(self._store(name), index_sha256=self.index_sha256.get(name))

    def setup(self, stage: str) -> None:
        """Agree with the other ranks on the name of this start."""
        if self.trainer is not None:
            self._start = self.trainer.strategy.broadcast(self._start)

    def train_dataloader(self) -> StreamingDataLoader:
        """Shuffled batches of exactly ``batch_size / world_size`` samples.

        Raises:
            UserError: the clusters hold fewer samples than one batch.
        """
        loader = self._loader(TRAIN, self.clusters, shuffle=True)
        dataset = loader.dataset
        assert isinstance(dataset, SafeStreamingDataset)
        if dataset.size < self.batch_size:
            raise UserError(
                f"{self.shards}: clusters {self.clusters} hold {dataset.size} training samples, fewer than the "
                f"{self.batch_size} of one step; lower global_batch_size or num_clusters"
            )
        return loader

    def val_dataloader(self) -> StreamingDataLoader | list[Any]:
        """Held-out samples in a fixed order; an empty list when there are none."""
        if not self.held_out_clusters:
            return []
        return self._loader(HELD_OUT, self.held_out_clusters, shuffle=False)

    def teardown(self, stage: str) -> None:
        """Remove this process's view of the cache (the fetched shards stay)."""
        shutil.rmtree(self._view(), ignore_errors=True)

    def _is_remote(self) -> bool:
        return "://" in self.shards

    def _rank_batch_size(self) -> int:
        return self.batch_size // (self.trainer.world_size if self.trainer else 1)

    def _store(self, name: str) -> Path:
        return self.cache / "store" / name

    def _view(self) -> Path:
        return self.cache / f"view-{self._start}"

    def _folder(self, cluster: int, split: str) -> tuple[str | None, Path]:
        name = f"cluster-{cluster}/{split}"
        if not self._is_remote():
            return None, Path(self.shards) / name
        # Streaming refuses a local folder that a killed process of its own had registered. A link that is
        # new for each start leads to the same store, so what was fetched before is not fetched again.
        store, link = self._store(name), self._view() / name
        store.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank was first
            link.symlink_to(store.resolve(), target_is_directory=True)
        return f"{self.shards.removeprefix('file://').rstrip('/')}/{name}", link

    def _check_fetched(self, split: str, clusters: Sequence[int]) -> None:
        """Refuse an index that was fetched and is not the manifest's: its clusters are others."""
        for cluster in clusters:
            name = f"cluster-{cluster}/{split}"
            wanted = self.index_sha256.get(name)
            if wanted is not None and sha256_file(self._store(name) / "index.json") != wanted:
                raise UserError(
                    f"{self.shards}/{name}/index.json: differs from what the manifest says: the shards there are of "
                    f"another preparation; put this run's prepared/shards there"
                )

    def _loader(self, split: str, clusters: Sequence[int], shuffle: bool) -> StreamingDataLoader:
        local_rank = 0
        if self.trainer is not None:
            local_rank = self.trainer.local_rank
            set_rank_environment(
                self.trainer.global_rank, self.trainer.world_size, local_rank, self.trainer.num_devices
            )
        dataset = open_streams(
            [self._folder(cluster, split) for cluster in clusters],
            batch_size=self._rank_batch_size(),
            shuffle=shuffle,
            seed=self.seed,
            is_local_leader=local_rank == 0,
        )
        if self._is_remote():
            self._check_fetched(split, clusters)
        return StreamingDataLoader(
            dataset,
            batch_size=self._rank_batch_size(),
            num_workers=self.num_workers,
            collate_fn=collate,
            drop_last=shuffle,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
        )
