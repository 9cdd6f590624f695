"""StreamingDataset that fails loudly: a damaged shard raises instead of hanging or ending the epoch.

It leans on private names of mosaicml-streaming 0.13 (setup.py pins ``<0.14``);
``tests/loading/test_streaming.py`` fails when one of them goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from ctypes import Array, c_char
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from threading import Event
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from filelock import FileLock
from streaming import Stream, StreamingDataset
from streaming.base.constant import RESUME
from streaming.base.dataset import _ShardState
from streaming.base.shared import SharedMemory, _get_path
from streaming.base.world import World

from ddm_lightning.errors import UserError
from ddm_lightning.schema import first_line

# Locks, threads and iterators of the parent process are useless, some deadly, after a fork.
_PER_PROCESS = ("_cache_filelock", "_executor", "_event", "_iterator")
_CAUSE_BYTES = 2048
_READ_ERRORS = (OSError, ValueError, IndexError, RuntimeError)


class ShardError(UserError):
    """Shards that cannot be read; one line, also when it comes out of a worker process."""

    def __init__(self, message: str) -> None:
        # DataLoader raises a worker's exception again with the worker's traceback for a message: the last
        # line of it is what was raised there.
        last = message.rstrip().rpartition("\n")[2]
        super().__init__(last.removeprefix(f"{__name__}.{type(self).__name__}: "))


class _Failure(Event):
    """The event on which Streaming's threads stop, set in every worker as soon as one has failed."""

    def __init__(self, cause: Array[c_char]) -> None:
        super().__init__()
        self._cause = cause

    def is_set(self) -> bool:
        return super().is_set() or self._cause[0] != b"\0"


class SafeStreamingDataset(StreamingDataset):
    """A StreamingDataset whose errors reach the consumer, whatever the number of workers.

    Differences from its base:

    - a shard that is missing, truncated or fails its hash raises ``ShardError`` in the training
      process (0.13.0: the epoch ends early without workers, and hangs with them), now and at each later
      iteration;
    - one instance may be iterated in the main process and then in forked workers;
    - a shard that was seen on disk is not locked again for each of its samples;
    - a resumed run opens no file at each epoch that it never closes.
    """

    def __init__(self, **settings: Any) -> None:
        # Shared with the workers: one that waits for a shard at which another failed would wait for ever.
        self._cause = RawArray(c_char, _CAUSE_BYTES)
        super().__init__(**settings)

    def _forget_parent(self) -> None:
        if self.__dict__.get("_owner_pid") != os.getpid():
            for name in _PER_PROCESS:
                self.__dict__.pop(name, None)
            self._shared_barrier.__dict__.pop("lock", None)
            self._owner_pid = os.getpid()
            self._seen_local: set[int] = set()
            self._event = _Failure(self._cause)

    def on_exception(self, future: Future[Any]) -> None:
        """Keep a background thread's exception for the consumer; it stops the threads of every worker."""
        error = future.exception()
        if error is not None:
            self._fail(first_line(error))

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """A sample by its index (base class); where that fails, the shard is named."""
        try:
            return super().get_item(sample_id, retry)
        except _READ_ERRORS as error:
            self._fail(self._named(self.spanner[sample_id][0], error))
            raise

    def _named(self, shard_id: int, error: BaseException) -> str:
        shard = self.shards[shard_id]
        raw, _ = shard.file_pairs[0]
        return f"{Path(shard.dirname, shard.split, raw.basename)}: {first_line(error)}"

    def _fail(self, cause: str) -> None:
        if not self._cause.value:  # the first cause is the cause
            self._cause.value = cause.encode("utf-8", errors="replace")[: _CAUSE_BYTES - 1]

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard present on local disk (base class), without a lock once it was seen there."""
        self._forget_parent()
        if shard_id in self._seen_local and not self.cache_limit and self._shard_states[shard_id] == _ShardState.LOCAL:
            return
        try:
            super().prepare_shard(shard_id, blocking)
        except BaseException as error:
            # Left at PREPARING, every other worker would wait for this shard for ever.
            self._shard_states[shard_id] = _ShardState.REMOTE
            self._fail(self._named(shard_id, error))
            raise
        if self._shard_states[shard_id] == _ShardState.LOCAL:
            self._seen_local.add(shard_id)

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
        self._set_shuffle_block_size(world)
        return epoch, sample

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Every sample of this rank and worker.

        Raises:
            ShardError: a shard cannot be read; the line carries the cause.
        """
        self._forget_parent()
        try:
            yield from super().__iter__()
        except _READ_ERRORS as error:
            self._fail(first_line(error))
        if self._event.is_set():
            cause = self._cause.value.decode("utf-8", errors="replace")
            raise ShardError(f"a shard cannot be read: {cause}; mend or fetch it, then the same command resumes")


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
) -> SafeStreamingDataset:
    """Open MDS folders as one dataset; each epoch gives every sample once.

    Args:
        folders: ``(remote, local)`` of each stream; ``remote`` is None where ``local`` holds the shards.
        batch_size: samples a step on this rank.
        shuffle: whether each epoch has an order of its own.
        seed: of that order; it does not depend on the number of ranks or workers.
        is_local_leader: whether this process is the node's first rank.

    Raises:
        ShardError: an index cannot be fetched or read, or no such scheme of URLs is known.
    """

    def build() -> SafeStreamingDataset:
        dataset = SafeStreamingDataset(
            streams=[
                Stream(remote=remote, local=str(local), validate_hash="xxh64" if remote else None)
                for remote, local in folders
            ],
            batch_size=batch_size,
            shuffle=shuffle,
            shuffle_seed=seed,
            num_canonical_nodes=1,
        )
        for stream, (remote, _) in zip(dataset.streams, folders, strict=True):
            if remote is not None:
                # A client opened for index.json and inherited by forked workers hangs them (sftp).
                stream._downloader.clean_up()
        return dataset

    # Two constructions at the same moment race for a shared-memory name (0.13.0). The leader alone takes
    # the lock, because the node's other ranks meet it at barriers inside the constructor.
    lock = FileLock(Path(tempfile.gettempdir()) / "ddm_lightning_streaming.lock")
    try:
        with lock if is_local_leader else contextlib.nullcontext():
            return build()
    except (*_READ_ERRORS, BotoCoreError, ClientError) as error:
        places = ", ".join(str(remote or local) for remote, local in folders)
        raise ShardError(
            f"{places}: shards cannot be opened: {first_line(error)}; check key 'island.shards'"
        ) from error
