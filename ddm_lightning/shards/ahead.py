"""Shards in the order of an epoch: at hand and checked before their first sample is used, dropped after their last.

The order is known, so that each shard has a first and a last step. Threads fetch shards ahead, as many as the cache
holds; a cache too small for all loses each shard after its last step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from queue import PriorityQueue
from threading import Event, Lock, Thread
from typing import Any

import numpy as np

from ddm_lightning.core import remote
from ddm_lightning.shards.fetch import Origin
from ddm_lightning.shards.mds import Ids, Shards

_NUM_THREADS = 4
# Shards on this machine that are checked, or read into memory, ahead of their first step.
_READ_AHEAD = 4
_NEVER = np.iinfo(np.int64).max
# Ends a thread: before all others in the order of first need.
_END = (-1, -1)


class FetchedShards(Shards):
    """Shards of some folders; those behind a URL, and compressed ones, go through the cache.

    Within ``reading``, ``take`` waits until the shards that it needs are on this machine. Several threads may call it.

    Args:
        origins: the folders.
        max_bytes: size of the cache; None to keep every shard.
        is_keeper: whether this process fetches ahead and evicts for all ranks of its node.

    Attributes:
        num_bytes: bytes of each shard, uncompressed.

    Raises:
        UserError: see ``Shards``.
    """

    def __init__(self, origins: Sequence[Origin], max_bytes: float | None = None, *, is_keeper: bool = True) -> None:
        super().__init__([shard for origin in origins for shard in origin.shards])
        self.num_bytes = np.array([shard.entry.raw_data.bytes for shard in self.shards])
        self._origins = [origin for origin in origins for _ in origin.shards]
        self._is_fetched = np.array([origin.is_fetched for origin in self._origins])
        self._cached_bytes = float(self.num_bytes[self._is_fetched].sum())
        self._max_bytes = np.inf
        if max_bytes is not None and max_bytes < self._cached_bytes:
            self._max_bytes = max_bytes

        self._is_keeper = is_keeper
        self._lock = Lock()
        self._ready: dict[int, Future[None]] = {}

    def least_bytes(self, num_samples: int) -> float:
        """Return the size of a cache that holds ``num_samples`` samples and two shards more."""
        some = num_samples * self.num_bytes.sum() / len(self) + 2 * self.num_bytes.max()
        return min(self._cached_bytes, float(some))

    def missing_bytes(self) -> float:
        """Return the most bytes by which the cache will grow."""
        return min(self._cached_bytes, self._max_bytes) - float(self.num_bytes[self._in_cache()].sum())

    @contextmanager
    def reading(self, order: Ids, step_size: int) -> Iterator[None]:
        """Fetch the shards of an epoch ahead of their first step, in threads that end with the block.

        Args:
            order: samples of the rest of the epoch, of all ranks.
            step_size: samples per step, of all ranks.
        """
        # The first and the last step that needs each shard.
        shards = self.shards_of(order)
        step = np.arange(len(order)) // step_size
        self._first = np.full(len(self.shards), _NEVER)
        self._last = np.full(len(self.shards), -1)
        # Of several values for one shard, the last one stays.
        self._first[shards[::-1]] = step[::-1]
        self._last[shards] = step
        del shards, step  # gigabytes, for the hundreds of millions of samples of an epoch
        self._wanted = -1  # latest step that has asked for a shard

        # Make room for the shards that are needed first.
        by_need = self._first.argsort(kind="stable")
        self._drop_from_cache(by_need[self.num_bytes[by_need].cumsum() > self._max_bytes])
        is_held = self._in_cache()
        self._held_bytes = self.num_bytes[is_held].sum()

        # Shards still to fetch, and still to open, by first step; shards still to drop, by last step.
        by_need = by_need[: np.count_nonzero(self._last >= 0)]
        is_missing = (self._is_fetched & ~is_held)[by_need]
        self._missing = by_need[is_missing].tolist()
        self._present = by_need[~is_missing].tolist()
        self._to_pass = [shard for shard in self._last.argsort().tolist() if self._last[shard] >= 0]
        self._read_ahead_steps = -(-_READ_AHEAD * len(self) // (step_size * len(self.shards)))

        self._jobs: PriorityQueue[tuple[int, int]] = PriorityQueue()
        self._stop = stop = Event()
        for _ in range(_NUM_THREADS):
            # Daemons, because the end of the process joins an executor's threads, even if they wait for a store.
            Thread(target=self._bring, args=(self._jobs, stop), daemon=True).start()

        try:
            self._open_ahead()
            yield
        finally:
            with self._lock:
                stop.set()
                for future in self._ready.values():
                    future.cancel()

                self._ready.clear()
                self._maps.clear()

            for _ in range(_NUM_THREADS):
                self._jobs.put(_END)

    def passed(self, step: int) -> None:
        """Drop the shards that no step after ``step`` needs; all batches up to it have been taken."""
        with self._lock:
            while self._to_pass and self._last[self._to_pass[0]] <= step:
                shard = self._to_pass.pop(0)
                self._maps.pop(shard, None)
                self._ready.pop(shard, None)
                if self._is_fetched[shard] and self._max_bytes < np.inf:
                    self._held_bytes -= self.num_bytes[shard]
                    self._drop_from_cache([shard])

            self._open_ahead()

    def _visit(self, ids: Ids, visit: Any) -> None:
        """Visit samples once their shards are here."""
        shards = np.unique(self.shards_of(ids)).tolist()
        with self._lock:
            if self._stop.is_set():
                raise CancelledError  # no thread fetches shards any more

            self._wanted = max(self._wanted, *self._first[shards])
            self._open_ahead()
            for shard in shards:
                future = self._ready.get(shard)
                if future is None or (future.done() and future.exception() is not None):
                    self._open(shard)  # again: it may have failed some time ago

            needed = [self._ready[shard] for shard in shards]

        for future in needed:
            future.result()

        super()._visit(ids, visit)

    def _open_ahead(self) -> None:
        """Order what may be fetched into the cache by now, and what will be read soon."""
        while self._missing and self._may_fetch(self._missing[0]):
            self._held_bytes += self.num_bytes[self._missing[0]]
            self._open(self._missing.pop(0))

        while self._present and self._first[self._present[0]] <= self._wanted + self._read_ahead_steps:
            self._open(self._present.pop(0))

    def _may_fetch(self, shard: int) -> bool:
        """Whether a step waits for the shard, or the cache has room for it."""
        has_room = self._held_bytes + self.num_bytes[shard] <= self._max_bytes
        return bool(self._first[shard] <= self._wanted or (self._is_keeper and has_room))

    def _open(self, shard: int) -> None:
        """Order a shard from the threads; ``_ready`` tells when it is here."""
        self._ready[shard] = Future()
        self._jobs.put((int(self._first[shard]), shard))

    def _bring(self, jobs: PriorityQueue[tuple[int, int]], stop: Event) -> None:
        """Bring the ordered shards here, those of the earliest step first; runs in each thread."""
        while True:
            job = jobs.get()
            if job == _END or stop.is_set():
                break

            _, shard = job
            future = self._ready.get(shard, Future())
            with suppress(InvalidStateError):  # nobody waits for it any more
                try:
                    self._origins[shard].bring(self.shards[shard], stop)
                    future.set_result(None)
                except Exception as error:  # noqa: BLE001  # raised where it is needed
                    future.set_exception(error)

        remote.disconnect()

    def _drop_from_cache(self, shards: Iterable[int]) -> None:
        """Remove shards from the cache; other ranks can still read those that they have mapped."""
        if self._is_keeper:
            for shard in shards:
                if self._is_fetched[shard]:
                    self.shards[shard].path.unlink(missing_ok=True)

    def _in_cache(self) -> np.ndarray:
        """Whether each shard is in the cache."""
        return self._is_fetched & [shard.path.is_file() for shard in self.shards]
