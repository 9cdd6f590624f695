"""Shards behind a URL, or compressed in a folder: fetched into a member's cache when they are needed.

A shard appears in the cache complete and checked, or not at all. Ranks and workers of a node share the cache: a lock
file per shard lets one process fetch it while the others wait or fetch another one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int
from streaming.base.compression import decompress
from streaming.base.storage.download import CloudDownloader, SFTPDownloader
from streaming.base.util import retry
from torch import Tensor

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import inside, sha256_file
from ddm_lightning.shards.mds import ShardFile, Shards
from ddm_lightning.shards.verify import ShardError, file_problem, read_index, unreadable

# Attempts per download from a URL; the S3 client also retries by itself.
_ATTEMPTS = 3
# Seconds without data after which a download fails.
SILENT_SECONDS = 20.0


class PatientSFTPDownloader(SFTPDownloader):
    """Streaming's SFTP downloader with a time limit; Streaming's own waits for a silent server for ever.

    Host keys are checked against ``~/.ssh/known_hosts`` or the file named by ``COMPOSER_SFTP_KNOWN_HOSTS_FILE``;
    the key comes from the agent, ``~/.ssh`` or the file named by ``COMPOSER_SFTP_KEY_FILE``.
    """

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        """Download ``remote``.

        Raises:
            OSError: the connection broke, or nothing came for ``timeout`` seconds.
        """
        url = urlsplit(remote)
        if self._ssh_client is None:
            self._create_ssh_client(url)
        assert self._ssh_client is not None
        try:
            with contextlib.closing(self._ssh_client.open_sftp()) as client:
                client.get_channel().settimeout(timeout)
                client.get(remotepath=unquote(url.path), localpath=local)
        except (EOFError, TimeoutError) as error:  # paramiko raises them without a message
            problem = "closed the connection" if isinstance(error, EOFError) else f"silent for {timeout:g} s"
            raise ConnectionError(f"{url.hostname}: {problem}") from error


class Origin:
    """One MDS folder that is fetched.

    Args:
        remote: URL (``s3://``, ``sftp://``, ``gs://``, ``hf://``, ``file://`` …) or folder.
        store: folder of the cache that holds the fetched shards, uncompressed.
    """

    def __init__(self, remote: str, store: Path) -> None:
        self.remote, self.store, self._name = remote.removeprefix("file://"), store, remote
        # One client per thread and process: after a fork, a parent's client hangs or corrupts the stream.
        self._clients: dict[tuple[int, int], CloudDownloader] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}

    def index(self, sha256: str | None = None) -> list[dict[str, Any]]:
        """Fetch ``index.json`` unless it is in the store, and read it.

        Args:
            sha256: the manifest's hash of it; None skips the comparison.

        Raises:
            ShardError: it cannot be fetched, or the URL's scheme is unknown.
            UserError: it is damaged, or belongs to another preparation.
        """
        path = self.store / "index.json"
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):
                if not path.exists():
                    os.replace(self._download(path.name), path)
        except Exception as error:  # each storage service has its own
            problem = f"shards cannot be opened: {_reason(error)}; check key 'island.shards'"
            raise ShardError(f"{self._name}: {problem}") from error
        finally:
            self.close()
        if sha256 is not None and sha256_file(path) != sha256:
            problem = "differs from the manifest's; put the shards of this run's prepare there"
            raise UserError(f"{self._name}/index.json: {problem}")
        return read_index(self.store)

    def fetch(self, info: dict[str, Any], *, wait: bool) -> bool:
        """Bring one shard into the store.

        Args:
            info: the shard's entry in the index.
            wait: whether to wait for a process that is fetching it.

        Returns:
            Whether the shard is there now.

        Raises:
            ShardError: it cannot be fetched, or differs from the index.
        """
        raw = self.store / info["raw_data"]["basename"]
        entry = info["zip_data"] or info["raw_data"]
        try:
            if raw.is_file():
                return True
            self.store.mkdir(parents=True, exist_ok=True)
            lock = Path(f"{raw}.lock")
            with FileLock(lock, timeout=-1 if wait else 0):
                if not raw.is_file():
                    inside(self.store, entry["basename"], self.store / "index.json")
                    partial = self._download(entry["basename"])
                    if problem := file_problem(partial, entry):
                        raise ValueError(f"arrived damaged: {problem}")
                    if info["zip_data"]:
                        partial.write_bytes(decompress(info["compression"], partial.read_bytes()))
                    os.replace(partial, raw)
                lock.unlink(missing_ok=True)  # the shard is there, so whoever waits needs no lock
        except Timeout:
            return False
        except Exception as error:  # each storage service and compression has its own
            raise unreadable(f"{self._name}/{entry['basename']}: {_reason(error)}") from error
        return True

    def _download(self, name: str) -> Path:
        partial = self.store / f"{name}.part"

        def download() -> None:
            partial.unlink(missing_ok=True)
            self._client().download(f"{self.remote}/{name}", str(partial), SILENT_SECONDS)

        if "://" in self.remote:
            download = retry(clean_up_fn=self.close, num_attempts=_ATTEMPTS)(download)
        download()
        return partial

    def _client(self) -> CloudDownloader:
        key = (os.getpid(), get_ident())
        if key not in self._clients:
            self._clients[key] = downloader_of(self.remote)
        return self._clients[key]

    def close(self) -> None:
        """Close this thread's connection."""
        if client := self._clients.pop((os.getpid(), get_ident()), None):
            client.clean_up()


def downloader_of(remote: str) -> CloudDownloader:
    """Return Streaming's downloader for a URL or a folder; SFTP's with a time limit."""
    kind: Any = PatientSFTPDownloader  # untyped
    if remote.startswith("sftp://"):
        return kind()
    return CloudDownloader.get(remote if "://" in remote else None)


def _reason(error: Exception) -> str:
    """Return an error's first line, and its cause's if the S3 client reports only the number of attempts."""
    last = getattr(error, "last_exception", None)
    return first_line(error) + (f": {first_line(last)}" if last is not None else "")


class FetchedShards(Shards):
    """Shards that are fetched when one of their samples is first needed. Nothing is evicted.

    Args:
        origins: the folders.
        index_sha256: the manifest's hash of each ``index.json``; None skips the comparison.

    Raises:
        ShardError, UserError: see ``Origin.index`` and ``Shards``.
    """

    def __init__(self, origins: Sequence[Origin], index_sha256: Sequence[str | None]) -> None:
        indices = [origin.index(sha256) for origin, sha256 in zip(origins, index_sha256, strict=True)]
        self._infos = [(origin, info) for origin, infos in zip(origins, indices, strict=True) for info in infos]
        super().__init__([ShardFile.of(origin.store, info) for origin, info in self._infos])
        self._is_here = np.array([file.path.is_file() for file in self.files])
        self._errors: dict[int, ShardError] = {}
        self._stop: Event | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stop": None}

    def missing_bytes(self) -> int:
        """Return the bytes still to be fetched, uncompressed."""
        return sum(file.num_bytes for file, is_here in zip(self.files, self._is_here, strict=True) if not is_here)

    def missing(self, ids: Int[np.ndarray, "m"]) -> list[int]:
        """Return the missing shards that the samples at ``ids`` need, in order of first need."""
        if self._is_here.all():
            return []
        shards = self.shards_of(ids)
        distinct, first = np.unique(shards[~self._is_here[shards]], return_index=True)
        self._is_here[distinct] = [self.files[shard].path.is_file() for shard in distinct]
        return [int(shard) for shard in distinct[first.argsort()] if not self._is_here[shard]]

    def fetch(self, shards: Sequence[int], *, wait: bool, stop: Event | None = None) -> None:
        """Fetch ``shards`` in turn; with ``wait=False``, skip those that another process is fetching.

        Raises:
            ShardError: a shard cannot be fetched, now or before.
        """
        for shard in shards:
            if stop is not None and stop.is_set():
                return
            if shard in self._errors:
                raise self._errors[shard]
            origin, info = self._infos[shard]
            try:
                if not self._is_here[shard]:
                    self._is_here[shard] = origin.fetch(info, wait=wait)
            except ShardError as error:
                self._errors[shard] = error
                raise

    def fetch_ahead(self, shards: Sequence[int]) -> None:
        """Fetch ``shards`` in a thread of this process; ``take`` raises if that fails."""
        self._stop = stop = Event()

        def run() -> None:
            with contextlib.suppress(ShardError):
                self.fetch(shards, wait=False, stop=stop)
            for origin, _ in self._infos:
                origin.close()

        Thread(target=run, daemon=True).start()

    def stop_fetching(self) -> None:
        """End the thread of ``fetch_ahead`` after its current shard."""
        if self._stop is not None:
            self._stop.set()

    def take(self, ids: Int[np.ndarray, "m"], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return one batch, see ``Shards.take``; fetch the shards that it needs.

        Raises:
            ShardError: a shard cannot be fetched.
        """
        for wait in (False, True):  # first the shards that no other process is fetching
            self.fetch(self.missing(ids), wait=wait)
        return super().take(ids, names)
