"""Shards of a member: read where they are or, if they are behind a URL or compressed, fetched into the member's cache.

A shard appears in the cache complete, or not at all. Every process compares a shard with the index when it first needs
it. Ranks of a node share the cache: a lock file per shard lets one process fetch it while the others wait. A training
waits for a store that is down, or that sends something else.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from threading import Event

from filelock import Timeout

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError, first_line, note
from ddm_lightning.core.files import locked, sha256_file
from ddm_lightning.shards.mosaic import decompress
from ddm_lightning.shards.verify import File, Shard, ShardError, file_problem, read_index, unreadable

PATIENCE_SECONDS = 600.0
"""Time to wait for a store that is down; below the time-out of the ranks that wait for this one."""
_PAUSE_SECONDS = 3.0
# Linux reads no more than its read-ahead, by default this, for one request.
_ADVICE_BYTES = 1 << 17


class Origin:
    """One MDS folder, with a folder in the cache if its shards need to be fetched or decompressed.

    Args:
        address: the folder or its URL.
        store: folder of the cache.
        index_sha256: the manifest's hash of ``index.json``; None skips the comparison.

    Attributes:
        is_fetched: whether its shards go through the cache.
        shards: read from ``address`` or ``store``.

    Raises:
        ShardError: the index cannot be fetched, or the URL's scheme is unknown.
        UserError: it is missing, damaged, or of another preparation.
    """

    def __init__(self, address: str, store: Path, index_sha256: str | None = None) -> None:
        self.address = address
        self.is_fetched = remote.is_url(address) or any(shard.packed for shard in read_index(Path(address)))
        folder = store if self.is_fetched else Path(address)
        index = folder / "index.json"
        if not index.exists():
            try:
                remote.get(f"{address}/{index.name}", index)  # each rank: it appears whole
            except OSError as error:
                raise ShardError(
                    f"{address}: shards cannot be opened: {first_line(error)}; check key 'island.shards'"
                ) from error

        if index_sha256 is not None and sha256_file(index) != index_sha256:
            raise UserError(
                f"{address}/index.json: differs from the manifest's; put the shards of this run's prepare there"
            )

        self.shards = read_index(folder)
        self._checked: set[Path] = set()
        self._is_down = False

    def bring(self, shard: Shard, stop: Event) -> None:
        """Make sure that a shard is on this machine and equals its entry; read it ahead if that is known.

        Args:
            shard: one of ``shards``.
            stop: ends the wait for another process and for a store that is down.

        Raises:
            ShardError: it cannot be fetched, or differs from the index.
        """
        raw = shard.path
        entry = shard.entry
        try:
            if raw in self._checked and raw.is_file():
                read_ahead(raw)
                return

            problem = file_problem(raw, entry.raw_data)
            if problem and not self.is_fetched:
                raise ValueError(problem)

            raw.parent.mkdir(parents=True, exist_ok=True)
            lock = Path(f"{raw}.lock")
            while problem and not stop.is_set():
                with suppress(Timeout), locked(lock, _PAUSE_SECONDS):
                    if file_problem(raw, entry.raw_data):
                        self._fetch(shard, stop)

                    lock.unlink(missing_ok=True)  # the shard is there, so whoever waits needs no lock
                    problem = None

            if not problem:
                self._checked.add(raw)
        except Exception as error:  # each compression has its own
            line = first_line(error)
            if self.address not in line:
                line = f"{raw}: {line}"

            raise unreadable(line) from error

    def _fetch(self, shard: Shard, stop: Event) -> None:
        entry = shard.entry
        stored = entry.zip_data or entry.raw_data
        partial = Path(f"{shard.path}.part")
        self._get(f"{self.address}/{stored.basename}", partial, stored, stop)
        if entry.zip_data:
            partial.write_bytes(decompress(entry.compression, partial.read_bytes()))

        os.replace(partial, shard.path)

    def _get(self, url: str, path: Path, stored: File, stop: Event) -> None:
        """Fetch a file of the index; if the store is down or sends something else, try again for ten minutes."""
        end = time.monotonic() + PATIENCE_SECONDS * remote.is_url(url)
        while True:
            try:
                remote.download(url, path)
                problem = file_problem(path, stored)
                if problem:
                    raise ConnectionError(f"{url}: {problem}")

                self._is_down = False
                return
            except ConnectionError as error:
                if time.monotonic() >= end or stop.is_set():
                    raise

                if not self._is_down:  # one of the threads that wait says so
                    self._is_down = True
                    note(f"{first_line(error)}; waits up to {PATIENCE_SECONDS / 60:g} minutes")

                stop.wait(_PAUSE_SECONDS)


def tidy(store: Path, index_sha256: str | None) -> None:
    """Remove from a cache what an earlier training left there of another preparation.

    Args:
        store: folder of the cache.
        index_sha256: the manifest's hash of ``index.json``; None for any.
    """
    index = store / "index.json"
    if index.exists() and index_sha256 not in (None, sha256_file(index)):
        shutil.rmtree(store)


def read_ahead(path: Path) -> None:
    """Ask the system to read a file into memory, where it can be asked."""
    if not hasattr(os, "posix_fadvise"):
        return

    with path.open("rb") as file:
        for start in range(0, path.stat().st_size, _ADVICE_BYTES):
            os.posix_fadvise(file.fileno(), start, _ADVICE_BYTES, os.POSIX_FADV_WILLNEED)
