"""Shards of a member: read where they are or, if they are behind a URL or compressed, fetched into the member's cache.

A shard appears in the cache complete and checked, or not at all. Ranks and workers of a node share the cache: a lock
file per shard lets one process fetch it while the others wait or fetch another one. A training waits for a store that
is down, or that sends something else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError, first_line, note
from ddm_lightning.core.files import inside, sha256_file
from ddm_lightning.shards.mds import ShardFile, Shards
from ddm_lightning.shards.mosaic import decompress
from ddm_lightning.shards.verify import ShardError, file_problem, read_index, unreadable

PATIENCE_SECONDS = 600.0
"""Time to wait for a store that is down; below the time-out of the ranks that wait for this one."""
_PAUSE_SECONDS = 3.0


class Origin:
    """One MDS folder, with a folder in the cache if its shards need to be fetched or decompressed.

    Args:
        address: the folder or its URL.
        store: folder of the cache.
        index_sha256: the manifest's hash of ``index.json``; None skips the comparison.

    Attributes:
        is_fetched: whether its shards go through the cache.
        folder: holds the shards that are read: ``address`` or ``store``.

    Raises:
        UserError: the index of a folder is missing or damaged.
    """

    def __init__(self, address: str, store: Path, index_sha256: str | None = None) -> None:
        self.address = address
        self.index_sha256 = index_sha256
        is_url = remote.is_url(address)
        self.is_fetched = is_url or any(entry["zip_data"] for entry in read_index(Path(address)))
        self.folder = store if self.is_fetched else Path(address)

    def entries(self) -> list[dict[str, Any]]:
        """Read ``index.json``; fetch it unless it is in the store.

        Raises:
            ShardError: it cannot be fetched, or the URL's scheme is unknown.
            UserError: it is damaged, or belongs to another preparation.
        """
        path = self.folder / "index.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(f"{path}.lock"):
                    if not path.exists():
                        remote.get(f"{self.address}/{path.name}", path)
            except OSError as error:
                raise ShardError(
                    f"{self.address}: shards cannot be opened: {first_line(error)}; check key 'island.shards'"
                ) from error
            remote.disconnect()  # workers are forked next
        if self.index_sha256 is not None and sha256_file(path) != self.index_sha256:
            raise UserError(
                f"{self.address}/index.json: differs from the manifest's; put the shards of this run's prepare there"
            )
        return read_index(self.folder)

    def fetch(self, entry: dict[str, Any], *, wait: bool) -> bool:
        """Bring one shard into the store.

        Args:
            entry: entry of the shard in the index.
            wait: whether to wait for a process that is fetching it, and for a store that is down.

        Returns:
            Whether the shard is there now.

        Raises:
            ShardError: it cannot be fetched, or differs from the index.
        """
        raw = self.folder / entry["raw_data"]["basename"]
        stored = entry["zip_data"] or entry["raw_data"]
        url = f"{self.address}/{stored['basename']}"
        if raw.is_file():
            return True
        try:
            lock = Path(f"{raw}.lock")
            with FileLock(lock, timeout=-1 if wait else 0):
                if not raw.is_file():
                    inside(self.folder, stored["basename"], self.folder / "index.json")
                    partial = Path(f"{raw}.part")
                    _get(url, partial, stored, PATIENCE_SECONDS if wait and remote.is_url(url) else 0.0)
                    if entry["zip_data"]:
                        partial.write_bytes(decompress(entry["compression"], partial.read_bytes()))
                    os.replace(partial, raw)
                lock.unlink(missing_ok=True)  # the shard is there, so whoever waits needs no lock
        except Timeout:
            return False
        except Exception as error:  # each compression has its own
            if isinstance(error, ConnectionError) and not wait:
                return False
            raise unreadable(first_line(error) if url in str(error) else f"{url}: {first_line(error)}") from error
        return True


def _get(url: str, path: Path, stored: dict[str, Any], patience: float) -> None:
    """Fetch a file of the index; if the store is down or sends something else, try again for ``patience`` seconds."""
    end, has_said = time.monotonic() + patience, False
    while True:
        try:
            remote.get(url, path)
            if problem := file_problem(path, stored):
                raise ConnectionError(f"{url}: arrived damaged: {problem}")
            return
        except ConnectionError as error:
            if time.monotonic() >= end:
                raise
            if not has_said:
                note(f"{first_line(error)}; waits up to {patience / 60:g} minutes")
                has_said = True
            time.sleep(_PAUSE_SECONDS)


class FetchedShards(Shards):
    """Shards of some folders; one that is not on this machine is fetched when needed. Nothing is evicted.

    Args:
        origins: the folders.

    Raises:
        ShardError, UserError: see ``Origin.entries`` and ``Shards``.
    """

    def __init__(self, origins: Sequence[Origin]) -> None:
        self._entries = [(origin, entry) for origin in origins for entry in origin.entries()]
        super().__init__([ShardFile.of(origin.folder, entry) for origin, entry in self._entries])
        in_place = [not origin.is_fetched for origin, _ in self._entries]
        self._is_here = np.array(in_place) | [file.path.is_file() for file in self.files]
        self._ahead: list[int] = []

    def missing_bytes(self) -> int:
        """Return the bytes still to be fetched, uncompressed."""
        return sum(file.num_bytes for file, is_here in zip(self.files, self._is_here, strict=True) if not is_here)

    def missing(self, ids: Int[np.ndarray, "m"]) -> list[int]:
        """Return the missing shards that the samples at ``ids`` need, in order of first need."""
        shards = self.shards_of(ids)
        distinct, first = np.unique(shards[~self._is_here[shards]], return_index=True)
        return distinct[first.argsort()].tolist()

    def fetch(self, shard: int, *, wait: bool = True) -> None:
        """Fetch a shard unless it is here; ``wait`` as in ``Origin.fetch``.

        Raises:
            ShardError: it cannot be fetched.
        """
        if not self._is_here[shard]:
            origin, entry = self._entries[shard]
            self._is_here[shard] = origin.fetch(entry, wait=wait)

    def fetch_ahead(self, shards: Sequence[int]) -> None:
        """Fetch ``shards`` in a thread of this process; one that fails is left to those that need it."""
        self._ahead = ahead = list(shards)

        def run() -> None:
            with suppress(IndexError, ShardError):  # emptied meanwhile, or damaged
                while ahead:
                    self.fetch(ahead.pop(0), wait=False)
            remote.disconnect()

        if ahead:
            Thread(target=run, daemon=True).start()

    def stop_fetching(self) -> None:
        """End the thread of ``fetch_ahead`` after its current shard."""
        self._ahead.clear()

    def _visit(self, ids: Int[np.ndarray, "m"], visit: Any) -> None:
        for wait in (False, True):  # first the shards that can be had at once
            for shard in self.missing(ids):
                self.fetch(shard, wait=wait)
        super()._visit(ids, visit)
