"""Finished shards to a URL: each file is uploaded, read back and compared; ``index.json`` goes last.

So a folder that has an index is whole, and an upload that was stopped goes on with the folders that have none.
"""

from __future__ import annotations

import posixpath
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, sha256_file
from ddm_lightning.core.schema import first_line

_KEY = "key 'prepare.shards.remote'"
_INDEX, _PARTIAL = "index.json", ".partial"
_ATTEMPTS = 3
_SECONDS = 120.0


class _Store(Protocol):
    """Somewhere that files can be put, below one URL."""

    def names(self) -> set[str] | None:
        """What is there already, by its path below the URL; None where that cannot be told."""
        ...

    def put(self, name: str) -> None:
        """Upload one file."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


def upload_shards(shards: Path, remote: str, tick: Callable[[int, int], None]) -> dict[str, str]:
    """Bring ``remote`` to what lies in ``shards``.

    Args:
        shards: folder with ``cluster-{k}/{split}/``.
        remote: URL of the folder that holds the same afterwards.
        tick: called with bytes done and bytes in all.

    Returns:
        The SHA-256 of each file, as it was read back.

    Raises:
        UserError: an address that nobody can write to, a folder that holds other data, or a file that arrives
            damaged three times.
    """
    ensure_torchvision_importable()
    remote = remote.rstrip("/")
    # Within a folder the index goes last.
    files = [path.relative_to(shards).as_posix() for path in shards.rglob("*") if path.is_file()]
    files.sort(key=lambda name: (posixpath.dirname(name), posixpath.basename(name) == _INDEX, name))
    hashes = {name: sha256_file(shards / name) for name in files}
    try:
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            store = _store(shards, remote)
            stack.callback(store.close)
            reader = _Reader(remote, scratch)
            stack.callback(reader.close)
            present = store.names()
            whole = _whole_folders(remote, hashes, present, reader)
            total, done = sum((shards / name).stat().st_size for name in files), 0
            for name in files:
                if posixpath.dirname(name) not in whole:
                    _put(store, reader, name, hashes[name], remote)
                done += (shards / name).stat().st_size
                tick(done, total)
    except UserError:
        raise
    except Exception as error:  # the stores' libraries have no base in common
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(
            f"{_KEY} = {remote!r}: cannot be written to ({problem}); check the address and the access to it"
        ) from error
    return hashes


def _whole_folders(remote: str, hashes: dict[str, str], present: set[str] | None, reader: _Reader) -> set[str]:
    """The folders that lie there already; refuses whatever else lies there."""
    strangers = sorted((present or set()) - set(hashes))
    if strangers:
        raise _other_data(remote, strangers[0])
    whole = set()
    for name, digest in hashes.items():
        if posixpath.basename(name) != _INDEX or (present is not None and name not in present):
            continue
        found = reader.sha256(name, may_be_missing=present is None)
        if found is not None and found != digest:
            raise _other_data(remote, name)
        if found is not None:
            whole.add(posixpath.dirname(name))
    return whole


def _other_data(remote: str, name: str) -> UserError:
    return UserError(f"{_KEY} = {remote!r}: holds other data ({name}); empty it, or name another folder")


def _put(store: _Store, reader: _Reader, name: str, digest: str, remote: str) -> None:
    for _ in range(_ATTEMPTS):
        store.put(name)
        if reader.sha256(name) == digest:
            return
    raise UserError(
        f"{_KEY} = {remote!r}: {name} arrived damaged {_ATTEMPTS} times; check the storage, then repeat the command"
    )


class _Reader:
    """Files read back, by the library that will read them while training."""

    def __init__(self, remote: str, scratch: Path) -> None:
        from streaming.base.storage.download import CloudDownloader

        # Streaming reads a mounted folder by its path.
        self._remote = remote.removeprefix("file://")
        self._downloader = CloudDownloader.get(None if remote.startswith("file://") else remote)
        self._copy = scratch / "copy"

    def sha256(self, name: str, *, may_be_missing: bool = False) -> str | None:
        """The hash of a file as it lies there; None for one that is not there, where that may be."""
        try:
            self._downloader.download(f"{self._remote}/{name}", str(self._copy), _SECONDS)
            return sha256_file(self._copy)
        except FileNotFoundError:
            if may_be_missing:
                return None
            raise
        finally:
            self._copy.unlink(missing_ok=True)

    def close(self) -> None:
        """End the connection."""
        self._downloader.clean_up()


def _store(shards: Path, remote: str) -> _Store:
    scheme = urlsplit(remote).scheme
    if scheme == "sftp":
        return _SFTPStore(shards, remote)
    return _FolderStore(shards, remote) if scheme == "file" else _CloudStore(shards, remote)


class _FolderStore:
    """A mounted folder."""

    def __init__(self, shards: Path, remote: str) -> None:
        self._shards, self._root = shards, Path(remote.removeprefix("file://"))
        self._root.mkdir(parents=True, exist_ok=True)

    def names(self) -> set[str] | None:
        """As ``_Store``."""
        return {path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file()}

    def put(self, name: str) -> None:
        """As ``_Store``; the file appears whole."""
        atomic_write(self._root / name, lambda temporary: shutil.copyfile(self._shards / name, temporary))

    def close(self) -> None:
        """Nothing is open."""


class _CloudStore:
    """What Streaming can upload to: S3, GCS, OCI, Azure and their like."""

    def __init__(self, shards: Path, remote: str) -> None:
        from streaming.base.storage.upload import CloudUploader

        self._prefix = urlsplit(remote).path.lstrip("/")
        self._uploader = CloudUploader.get((str(shards), remote), keep_local=True, exist_ok=True, retry=_ATTEMPTS)

    def names(self) -> set[str] | None:
        """As ``_Store``; not every store of Streaming's can list."""
        if not hasattr(self._uploader, "list_objects"):
            return None
        found = self._uploader.list_objects("")
        return {posixpath.relpath(name, self._prefix or ".") for name in found or []}

    def put(self, name: str) -> None:
        """As ``_Store``."""
        self._uploader.upload_file(name)

    def close(self) -> None:
        """Nothing: each request is a connection."""


class _SFTPStore:
    """An SFTP server, to which Streaming reads but does not write."""

    def __init__(self, shards: Path, remote: str) -> None:
        from streaming.base.storage.download import SFTPDownloader

        self._shards, self._url = shards, urlsplit(remote)
        # Its connection, so that one set of keys and known hosts serves both ways.
        connection: Any = SFTPDownloader()
        self._connection = connection
        self._connection._create_ssh_client(self._url)
        self._client = self._connection._ssh_client.open_sftp()
        self._client.get_channel().settimeout(_SECONDS)
        self._root = unquote(self._url.path)

    def names(self) -> set[str] | None:
        """As ``_Store``."""
        return set(self._walk(""))

    def _walk(self, below: str) -> Iterator[str]:
        try:
            entries = self._client.listdir_attr(posixpath.join(self._root, below))
        except FileNotFoundError:
            return
        for entry in entries:
            name = posixpath.join(below, entry.filename)
            if stat.S_ISDIR(entry.st_mode or 0):
                yield from self._walk(name)
            elif not name.endswith(_PARTIAL):
                yield name

    def put(self, name: str) -> None:
        """As ``_Store``; the file appears whole."""
        target = posixpath.join(self._root, name)
        self._make_folders(posixpath.dirname(target))
        self._client.put(str(self._shards / name), target + _PARTIAL)
        self._client.posix_rename(target + _PARTIAL, target)

    def _make_folders(self, folder: str) -> None:
        try:
            self._client.stat(folder)
        except FileNotFoundError:
            if posixpath.dirname(folder) != folder:
                self._make_folders(posixpath.dirname(folder))
            self._client.mkdir(folder)

    def close(self) -> None:
        """End the connection."""
        self._connection.clean_up()
