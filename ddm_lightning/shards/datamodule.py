"""The LightningDataModule: prepared shards of one cluster, of several, or of all, as batches."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.shards import preflight
from ddm_lightning.shards.local import LocalLoader, is_packed, open_shards, unpack
from ddm_lightning.shards.manifest import HELD_OUT, OUT_OF_CLUSTER, TRAIN, shard_name
from ddm_lightning.shards.order import Ranks
from ddm_lightning.shards.shared_memory import note_end, note_start, remove_leftovers
from ddm_lightning.shards.streaming import SafeStreamingLoader, open_streams, set_rank_environment
from ddm_lightning.shards.verify import remove_damaged, verify_shards

AUTO, STREAMING, LOCAL = LOADERS = ("auto", "streaming", "local")


class ClusterDataModule(L.LightningDataModule):
    """Batches of the MDS shards of some clusters.

    Several clusters are mixed in their natural proportions (every sample once an epoch), which is what
    the router and the monolith train on. A batch holds every column of fixed size: ``sample_id``, ``cluster`` and
    ``label`` int64 ``[b]``, ``text`` float32 ``[b d]``, and as they are stored ``x_0`` (``[b c h w]``) and what else
    there is (``x_0_flipped``, ``text_ids``, ``text_tokens`` …). Captions are left out.

    Batches and their order are the same with either back end, any number of workers and, step by step, any
    number of ranks; the loaders' ``state_dict`` goes on exactly with any of these.

    Args:
        shards: folder, or URL of a folder, that holds ``cluster-{k}/train`` and ``cluster-{k}/held-out``. What a
            URL names (``s3://``, ``sftp://``, ``gs://``, ``hf://`` …; ``file://`` for a mounted folder) is fetched as
            it is needed.
        clusters: the clusters k to load.
        batch_size: samples an optimizer step, over all ranks.
        seed: of the sample order.
        cache: folder of this member alone, for shards fetched from a URL or unpacked.
        num_workers: data-loading processes of one rank.
        held_out_clusters: clusters whose held-out samples are validated on (those that have any).
        out_of_cluster: clusters for whose experts samples of other clusters were drawn; these are trained on, too.
        columns: what the manifest says of them, by name.
        index_sha256: what the manifest says of each ``index.json``, by ``cluster-{k}/{split}``.
        loader: ``local`` (reads a folder directly), ``streaming`` (Streaming's back ends) or ``auto`` (``local`` where
            the shards lie in a folder).
        num_canonical_nodes: parts of the shards that take turns in the order; with one a node, no node needs
            another's. The order depends on it.
        pin_memory: whether batches are for a GPU.

    Raises:
        UserError: no such loader, or ``local`` for a URL.
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
        out_of_cluster: Sequence[int] = (),
        columns: Mapping[str, str] | None = None,
        index_sha256: Mapping[str, str] | None = None,
        loader: str = AUTO,
        num_canonical_nodes: int = 1,
        pin_memory: bool = False,
    ) -> None:
        super().__init__()
        self.shards = str(shards)
        self.clusters = list(clusters)
        self.batch_size = batch_size
        self.seed = seed
        self.cache = cache
        self.num_workers = num_workers
        self.held_out_clusters = list(held_out_clusters)
        self.out_of_cluster = list(out_of_cluster)
        self._training = [shard_name(k, TRAIN) for k in self.clusters]
        self._training += [shard_name(k, OUT_OF_CLUSTER) for k in self.out_of_cluster]
        self._held_out = [shard_name(k, HELD_OUT) for k in self.held_out_clusters]
        self.columns = dict(columns or {})
        self.index_sha256 = dict(index_sha256 or {})
        self.num_canonical_nodes = num_canonical_nodes
        self.pin_memory = pin_memory
        if loader not in LOADERS:
            raise UserError(f"key 'island.loader' = {loader!r}: give one of {', '.join(LOADERS)}")
        if loader == LOCAL and self._is_remote():
            raise UserError(
                f"key 'island.loader' = 'local' reads no URL ({self.shards}); use 'auto', or copy the shards here "
                "and set island.shards to their folder"
            )
        self.loader = loader if loader != AUTO else STREAMING if self._is_remote() else LOCAL
        self._start = uuid.uuid4().hex[:8]
        self._numbers: list[int] = []

    def prepare_data(self) -> None:
        """Check every shard that lies here against its index before anything trains on it.

        Of fetched ones, those that differ are removed, and so is what was fetched for an earlier preparation:
        Streaming checks what it fetches, and never again. What a killed start of this member left in shared memory is
        removed.

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
        remove_leftovers(self.cache)
        for name in (*self._training, *self._held_out):
            sha256 = self.index_sha256.get(name)
            if not self._is_remote():
                verify_shards(Path(self.shards) / name, index_sha256=sha256)
            if self._is_unpacked_here(name):
                unpack(Path(self.shards) / name, self._store(name), index_sha256=sha256)
            elif (self._store(name) / "index.json").exists():
                remove_damaged(self._store(name), index_sha256=sha256)

    def setup(self, stage: str) -> None:
        """Agree with the other ranks on the name of this start."""
        if self.trainer is not None:
            self._start = self.trainer.strategy.broadcast(self._start)

    def train_dataloader(self) -> LocalLoader | SafeStreamingLoader:
        """Shuffled batches of exactly ``batch_size / world_size`` samples.

        Raises:
            UserError: the clusters hold fewer samples than one batch, the ranks cannot share a batch equally, or
                the disk or the shared memory is too small.
        """
        loader = self._loader(self._training, shuffle=True)
        preflight.check_samples(f"{self.shards}: clusters {self.clusters}", len(loader.shards), self.batch_size)
        return loader

    def val_dataloader(self) -> LocalLoader | SafeStreamingLoader | list[Any]:
        """Held-out samples in a fixed order; an empty list when there are none."""
        return self._loader(self._held_out, shuffle=False) if self._held_out else []

    def transfer_batch_to_device(
        self, batch: dict[str, Tensor], device: torch.device, dataloader_idx: int
    ) -> dict[str, Tensor]:
        """The columns on ``device``; Lightning would look for tensors in whatever a batch may be."""
        return {name: value.to(device, non_blocking=device.type == "cuda") for name, value in batch.items()}

    def teardown(self, stage: str) -> None:
        """Remove this process's view of the cache (the fetched shards stay), and its lock files."""
        for number in self._numbers:
            note_end(self.cache, number)
        self._numbers.clear()
        shutil.rmtree(self._view(), ignore_errors=True)

    def training_folders(self) -> list[Path]:
        """Where the training shards lie on this machine, uncompressed; call ``prepare_data`` before.

        Raises:
            UserError: they were never fetched here.
        """
        folders = [
            self._store(name) if self._is_remote() or self._is_unpacked_here(name) else Path(self.shards) / name
            for name in self._training
        ]
        missing = [folder for folder in folders if not (folder / "index.json").exists()]
        if missing:
            raise UserError(f"{missing[0]}: no shards here; run this where the member was trained")
        return folders

    def ranks(self) -> Ranks:
        """Which rank this is; the only one without a trainer."""
        trainer = self.trainer
        if trainer is None:
            return Ranks()
        return Ranks(trainer.num_nodes, trainer.world_size // trainer.num_nodes, trainer.global_rank)

    def _is_remote(self) -> bool:
        return "://" in self.shards

    def _is_unpacked_here(self, name: str) -> bool:
        return self.loader == LOCAL and is_packed(Path(self.shards) / name)

    def _store(self, name: str) -> Path:
        return self.cache / "store" / name

    def _view(self) -> Path:
        return self.cache / f"view-{self._start}"

    def _folder(self, name: str) -> tuple[str | None, Path]:
        """Where Streaming fetches shards from, and to; from nowhere if they can be read where they lie."""
        if not self._is_remote() and not is_packed(Path(self.shards) / name):
            return None, Path(self.shards) / name
        # Streaming refuses a local folder that a killed process of its own had registered. A link that is
        # new for each start leads to the same store, so what was fetched before is not fetched again.
        store, link = self._store(name), self._view() / name
        store.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank was first
            link.symlink_to(store.resolve(), target_is_directory=True)
        return f"{self.shards.removeprefix('file://').rstrip('/')}/{name}", link

    def _check_fetched(self, names: Sequence[str]) -> None:
        """Refuse an index that was fetched and is not the manifest's: its clusters are others."""
        for name in names:
            wanted = self.index_sha256.get(name)
            if wanted is not None and sha256_file(self._store(name) / "index.json") != wanted:
                raise UserError(
                    f"{self.shards}/{name}/index.json: differs from what the manifest says: the shards there are of "
                    f"another preparation; put this run's prepared/shards there"
                )

    def _loader(self, names: Sequence[str], shuffle: bool) -> LocalLoader | SafeStreamingLoader:
        ranks = self.ranks()
        preflight.check_nodes(self.num_canonical_nodes, ranks.num_nodes)
        settings: dict[str, Any] = {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.num_workers > 0,
        }
        loader = (self._local if self.loader == LOCAL else self._streaming)(names, shuffle, ranks, settings)
        found = {column.name: column.encoding for column in loader.shards.layout.columns}
        if not self.columns.items() <= found.items():
            raise UserError(f"{self.shards}: columns {found} are not the manifest's, {self.columns}; copy both again")
        return loader

    def _local(self, names: Sequence[str], shuffle: bool, ranks: Ranks, settings: Mapping[str, Any]) -> LocalLoader:
        folders = [self._store(name) if self._is_unpacked_here(name) else Path(self.shards) / name for name in names]
        shards = open_shards(folders)
        self._check_shared_memory(0, shards.bytes_per_sample, ranks)
        return LocalLoader(
            shards,
            ranks=ranks,
            batch_size=preflight.rank_batch_size(self.batch_size, ranks),
            seed=self.seed,
            shuffle=shuffle,
            full=shuffle,
            num_canonical_nodes=self.num_canonical_nodes,
            **settings,
        )

    def _streaming(
        self, names: Sequence[str], shuffle: bool, ranks: Ranks, settings: Mapping[str, Any]
    ) -> SafeStreamingLoader:
        batch_size = preflight.rank_batch_size(self.batch_size, ranks)
        if self.trainer is not None:
            set_rank_environment(ranks.rank, ranks.num_ranks, ranks.rank_of_node, ranks.ranks_per_node)
        folders = [self._folder(name) for name in names]
        dataset = open_streams(
            folders,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.seed,
            is_local_leader=ranks.rank_of_node == 0,
            full=shuffle,
            num_canonical_nodes=self.num_canonical_nodes,
        )
        if ranks.rank_of_node == 0:
            self._numbers.append(dataset.shared_memory_number)
            note_start(self.cache, dataset.shared_memory_number, [str(local) for _, local in folders])
        if self._is_remote():
            self._check_fetched(names)
            self.cache.mkdir(parents=True, exist_ok=True)
            preflight.check_disk(
                self.cache, dataset.missing_bytes(), f"the shards still to be fetched of {', '.join(names)}"
            )
        self._check_shared_memory(dataset.size, dataset.rows.bytes_per_sample, ranks)
        return SafeStreamingLoader(dataset, **settings)

    def _check_shared_memory(self, num_ordered: int, bytes_per_sample: int, ranks: Ranks) -> None:
        batch_bytes = bytes_per_sample * (self.batch_size // ranks.num_ranks)
        needed = preflight.shared_memory_bytes(num_ordered, batch_bytes, self.num_workers, ranks.ranks_per_node)
        preflight.check_shared_memory(needed)
