"""The ``streaming`` back end: Streaming's index, downloads and resumption; our order, whole batches, loud failures.

It leans on private names of mosaicml-streaming 0.13 (setup.py pins ``<0.14``);
``tests/shards/test_streaming.py`` fails when one of them goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from ctypes import Array, c_char
from functools import partial
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import numpy as np
from filelock import FileLock
from jaxtyping import Int
from streaming import Stream, StreamingDataLoader, StreamingDataset
from streaming.base.constant import RESUME, TICK
from streaming.base.dataset import _ShardState
from streaming.base.format.mds import MDSReader
from streaming.base.shared import SharedMemory, _get_path
from streaming.base.storage.download import SFTPDownloader
from streaming.base.world import World
from torch import Tensor, distributed

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import inside
from ddm_lightning.core.schema import first_line
from ddm_lightning.shards.mds import Layout, ShardFile, Shards
from ddm_lightning.shards.order import Ranks, epoch_order, num_steps, steps
from ddm_lightning.shards.sftp import PatientSFTPDownloader
from ddm_lightning.shards.shared_memory import remove_unowned, search_closes_what_it_opens
from ddm_lightning.shards.verify import ShardError, unreadable
from ddm_lightning.shards.workers import as_it_is, end_with_parent, workers_end_with_an_error

# Locks of the parent process are useless, some deadly, after a fork.
_PER_PROCESS = ("_cache_filelock",)
_CAUSE_BYTES = 2048
_ATTEMPTS = 3
# How long a server may be silent; the S3 client tries five times itself.
SILENT_SECONDS = 20.0


class _Failure(Event):
    """The event on which a process stops, set in every worker as soon as one has failed."""

    def __init__(self, cause: Array[c_char]) -> None:
        super().__init__()
        self._cause = cause

    def is_set(self) -> bool:
        return super().is_set() or self._cause[0] != b"\0"


class SafeStreamingDataset(StreamingDataset):
    """A StreamingDataset of whole batches, whose errors reach the consumer, whatever the number of workers.

    Differences from its base:

    - it iterates batches (``Shards.take``), not samples, each gathered from memory maps, and its length is in batches;
      for a DataLoader with ``batch_size=None``;
    - its order is ``shards.order``'s, in which ranks share no sample where steps are full;
    - a shard that is missing, truncated or fails its hash raises ``ShardError`` in the training
      process (0.13.0: the epoch ends early without workers, and hangs with them), now and at each later
      iteration;
    - one instance may be iterated in the main process and then in forked workers;
    - no thread, lock or open file for each sample: one thread fetches ahead while there are shards to fetch;
    - a resumed run opens no file at each epoch that it never closes.

    Args:
        full: whether samples that fill no step of all ranks are left out.
        settings: of StreamingDataset.
    """

    def __init__(self, *, full: bool, **settings: Any) -> None:
        # Shared with the workers: one that waits for a shard at which another failed would wait for ever.
        self._cause = RawArray(c_char, _CAUSE_BYTES)
        self._full = full
        super().__init__(**settings)
        self.rows = Shards([_file(shard) for shard in self.shards])

    def __len__(self) -> int:
        """Batches of this rank in an epoch."""
        return num_steps(self.size, self._parallel_rank_world.num_ranks, self.batch_size or 1, full=self._full)

    @property
    def shared_memory_number(self) -> int:
        """The number with which the names of its shared memory begin."""
        return int(self._shm_prefix_int)

    def missing_bytes(self) -> int:
        """Bytes of the shards that are still to be fetched, unpacked."""
        return sum(
            file.num_bytes
            for file, state in zip(self.rows.files, self._shard_states.numpy(), strict=True)
            if state != _ShardState.LOCAL
        )

    def _forget_parent(self) -> None:
        if self.__dict__.get("_owner_pid") != os.getpid():
            for name in _PER_PROCESS:
                self.__dict__.pop(name, None)
            self._shared_barrier.__dict__.pop("lock", None)
            self._owner_pid = os.getpid()
            self._ready = np.zeros(self.num_shards, dtype=bool)
            self._event = _Failure(self._cause)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """One sample with all its columns by its index (base class); where that fails, the shard is named."""
        try:
            return super().get_item(sample_id, retry)
        except (OSError, ValueError, IndexError, RuntimeError) as error:
            self._fail(self._named(self.spanner[sample_id][0], error))
            raise

    def _named(self, shard_id: int, error: BaseException) -> str:
        """Where the shard should have come from, and the first line of what went wrong."""
        stream, shard = self.streams[self.stream_per_shard[shard_id]], self.shards[shard_id]
        raw, packed = shard.file_pairs[0]
        place = f"{stream.remote}/{(packed or raw).basename}" if stream.remote else str(self.rows.files[shard_id].path)
        last = getattr(error, "last_exception", None)  # the S3 client says how often it tried, and this says why
        return f"{place}: {first_line(error)}" + (f": {first_line(last)}" if last is not None else "")

    def _fail(self, cause: str) -> None:
        if not self._cause.value:  # the first cause is the cause
            self._cause.value = cause.encode("utf-8", errors="replace")[: _CAUSE_BYTES - 1]

    def _check(self) -> None:
        if self._event.is_set():
            raise unreadable(self._cause.value.decode("utf-8", errors="replace"))

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard present on local disk (base class)."""
        self._forget_parent()
        try:
            super().prepare_shard(shard_id, blocking)
            path = self.rows.files[shard_id].path
            if self._shard_states[shard_id] == _ShardState.LOCAL and not path.is_file():
                raise FileNotFoundError(f"{path} is not there although it was fetched; was its folder removed?")
        except BaseException as error:
            # Left at PREPARING, every other worker would wait for this shard for ever.
            self._shard_states[shard_id] = _ShardState.REMOTE
            self._fail(self._named(shard_id, error))
            raise

    def _is_ready(self, shard_id: int) -> bool:
        """Whether the shard lies here unpacked. That stays so: nothing is evicted."""
        if not self._ready[shard_id]:
            local = self._shard_states[shard_id] == _ShardState.LOCAL
            self._ready[shard_id] = local and self.rows.files[shard_id].path.is_file()
        return bool(self._ready[shard_id])

    def _fetch(self, shard_ids: list[int], stop: Event) -> None:
        """Fetch what another worker is not fetching. In a thread of its own."""
        for shard_id in shard_ids:
            if stop.is_set() or self._event.is_set():
                return
            try:
                self.prepare_shard(shard_id, blocking=False)
            except Exception:  # noqa: BLE001  # prepare_shard has told the consumer
                return

    def _resume(self, world: World, epoch: int) -> tuple[int, int]:
        """Epoch and sample at which the next iteration begins (base class), for ``epoch`` or the one resumed in.

        The base class leaves the shared memory open: two file descriptors an epoch and a checkpoint, in a
        resumed run, until there are no more.
        """
        state: dict[str, Any] = {"epoch": -1}
        with contextlib.suppress(FileNotFoundError):  # nothing was resumed
            shared = SharedMemory(_get_path(self._shm_prefix_int, RESUME), create=False, auto_cleanup=False)
            state = json.loads(bytes(shared.buf).partition(b"\0")[0])
            shared.cleanup()
        sample = 0
        if state["epoch"] >= epoch:
            epoch, sample = state["epoch"], state["sample_in_epoch"]
            self.num_canonical_nodes = state["num_canonical_nodes"]
            self.shuffle_seed = state["shuffle_seed"]
            self.initial_physical_nodes = state["initial_physical_nodes"]
        return epoch, sample

    def _get_work(self, epoch: int, sample_in_epoch: int) -> Int[np.ndarray, "m batch"]:
        """What this worker gives of the rest of an epoch, a row a batch, filled up with -1.

        One process of the node computes the order, and all take their part of it from shared memory.
        """
        world = self._unique_worker_world
        shared: Sequence[SharedMemory | None]
        if world.is_local_leader:
            work = self._work(world, epoch, sample_in_epoch)
            shared = self._share_work(work)
            self._shared_barrier(world.workers_per_node)
        else:
            self._shared_barrier(world.workers_per_node)
            work, *shared = self._attach_work()
        mine = work[world.node, world.rank_of_node, world.worker_of_rank].copy()
        del work
        self._shared_barrier(world.workers_per_node)
        for memory in shared:
            if memory is not None:
                memory.cleanup()
        return mine

    def _work(
        self, world: World, epoch: int, sample_in_epoch: int
    ) -> Int[np.ndarray, "nodes ranks workers batches batch"]:
        assert self.batch_size is not None and self.num_canonical_nodes is not None
        order = epoch_order(
            self.rows.sizes,
            seed=self.shuffle_seed,
            epoch=epoch,
            shuffle=self.shuffle,
            num_canonical_nodes=self.num_canonical_nodes,
        )
        ranks = Ranks(world.num_nodes, world.ranks_per_node)
        table = steps(order[sample_in_epoch:], ranks, self.batch_size, full=self._full)
        # A DataLoader asks its workers in turn.
        idle = -table.shape[2] % world.workers_per_rank
        table = np.pad(table, ((0, 0), (0, 0), (0, idle), (0, 0)), constant_values=-1)
        turns = table.reshape(*table.shape[:2], -1, world.workers_per_rank, self.batch_size)
        return np.ascontiguousarray(turns.transpose(0, 1, 3, 2, 4))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Every batch of this rank and worker.

        Raises:
            ShardError: a shard cannot be read; the line carries the cause.
        """
        self._forget_parent()
        self._check()
        self._unique_worker_world = self._unique_rank_world.detect_workers()
        self._parallel_worker_world = self._unique_worker_world
        epoch, sample_in_epoch = self._resume_incr_epoch()
        work = self._get_work(epoch, sample_in_epoch)
        stop = Event()
        wanted = self.rows.shards_of(work[work >= 0])
        distinct, first = np.unique(wanted, return_index=True)
        missing = [shard_id for shard_id in distinct[first.argsort()].tolist() if not self._is_ready(shard_id)]
        if missing:
            Thread(target=self._fetch, args=(missing, stop), daemon=True).start()
        try:
            for row in work:
                ids = row[row >= 0]
                if len(ids):
                    yield self._take(ids)
        finally:
            stop.set()

    def _take(self, ids: Int[np.ndarray, "m"]) -> dict[str, Tensor]:
        shard_ids = self.rows.shards_of(ids)
        for shard_id in shard_ids[~self._ready[shard_ids]].tolist():
            while not self._is_ready(shard_id):
                self._check()
                sleep(TICK)
        self._check()
        try:
            return self.rows.take(ids)
        except (OSError, ValueError) as error:
            self._fail(first_line(error))
            raise unreadable(first_line(error)) from error


class SafeStreamingLoader(StreamingDataLoader):
    """A StreamingDataLoader of a SafeStreamingDataset's batches; an error ends its workers at once."""

    def __init__(self, dataset: SafeStreamingDataset, **settings: Any) -> None:
        watched = partial(end_with_parent, os.getpid())
        super().__init__(dataset, batch_size=None, collate_fn=as_it_is, worker_init_fn=watched, **settings)
        self.shards = dataset.rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # type: ignore[override]  # as StreamingDataLoader does
        """What is left of the epoch resumed in, or the next one."""
        with workers_end_with_an_error(self):
            yield from super().__iter__()


def _file(shard: Any) -> ShardFile:
    folder = Path(shard.dirname, shard.split)
    if not isinstance(shard, MDSReader):
        raise UserError(f"{folder}: holds shards that are not MDS; prepare them anew")
    layout = Layout.of(shard.column_names, shard.column_encodings, shard.column_sizes)
    path = inside(folder, shard.raw_data.basename, folder / "index.json")
    return ShardFile(path, shard.samples, shard.raw_data.bytes, layout)


def set_rank_environment(rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    """Tell Streaming about the ranks, before a dataset is built.

    Streaming reads these four variables and nothing else; Lightning's own launcher sets only some of
    them, and then every rank streams the same samples (Lightning #20140, streaming #740).
    """
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_world_size),
    )


def open_streams(
    folders: list[tuple[str | None, Path]],
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    is_local_leader: bool,
    full: bool = False,
    num_canonical_nodes: int = 1,
) -> SafeStreamingDataset:
    """Open MDS folders as one dataset; each epoch gives every sample once.

    Args:
        folders: ``(remote, local)`` of each stream; ``remote`` is None where ``local`` holds the shards.
        batch_size: samples a step on this rank.
        shuffle: whether each epoch has an order of its own.
        seed: of that order; it does not depend on the number of ranks or workers.
        is_local_leader: whether this process is the node's first rank.
        full: whether samples that fill no step of all ranks are left out.
        num_canonical_nodes: into how many parts the shards are split that take turns (``shards.order``).

    Raises:
        ShardError: an index cannot be fetched or read, or no such scheme of URLs is known.
    """

    def build() -> SafeStreamingDataset:
        dataset = SafeStreamingDataset(
            streams=[_stream(remote, local) for remote, local in folders],
            batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=seed,
            num_canonical_nodes=num_canonical_nodes,
            full=full,
        )
        for stream, (remote, _) in zip(dataset.streams, folders, strict=True):
            if remote is not None:
                # A client opened for index.json and inherited by forked workers hangs them (sftp).
                stream._downloader.clean_up()
        return dataset

    # Two constructions at the same moment race for a shared-memory number (0.13.0). The leader alone takes the
    # lock, because the node's other ranks meet it at barriers inside the constructor; they look for the number
    # only once it has the lock, as all of them must find the same one.
    lock = FileLock(Path(tempfile.gettempdir()) / "ddm_lightning_streaming.lock")
    try:
        with lock if is_local_leader else contextlib.nullcontext():
            if is_local_leader:
                remove_unowned()
            if distributed.is_available() and distributed.is_initialized():
                distributed.barrier()
            with search_closes_what_it_opens():
                return build()
    except UserError:
        raise
    except Exception as error:  # whatever a client of a storage service raises
        places = ", ".join(str(remote or local) for remote, local in folders)
        raise ShardError(
            f"{places}: shards cannot be opened: {first_line(error)}; check key 'island.shards'"
        ) from error


def _stream(remote: str | None, local: Path) -> Stream:
    stream = Stream(
        remote=remote,
        local=str(local),
        validate_hash="xxh64" if remote else None,
        download_retry=_ATTEMPTS if remote and "://" in remote else 1,
        download_timeout=SILENT_SECONDS,
    )
    if isinstance(stream._downloader, SFTPDownloader):
        stream._downloader = PatientSFTPDownloader()
    return stream
