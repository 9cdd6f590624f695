"""Upload finished shards to a URL: each file is uploaded, read back and compared; ``index.json`` goes last.

A folder with an index is therefore complete, and an interrupted upload resumes with the folders that have none.
"""

from __future__ import annotations

import posixpath
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from streaming.base.storage.upload import CloudUploader

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_write, sha256_file
from ddm_lightning.shards.fetch import downloader_of

_INDEX, _PARTIAL = "index.json", ".partial"
_ATTEMPTS = 3
_SECONDS = 120.0


def upload_shards(shards: Path, remote: str, tick: Callable[[int, int], None]) -> dict[str, str]:
    """Make ``remote`` hold the files of ``shards``.

    Args:
        shards: folder with ``cluster-{k}/{split}/``.
        remote: URL of the folder to fill.
        tick: called with the bytes done and the bytes in total.

    Returns:
        The SHA-256 of each file, as read back.

    Raises:
        UserError: ``remote`` cannot be written to or holds other data, or a file arrives damaged three times.
    """
    remote = remote.rstrip("/")
    files = [path.relative_to(shards).as_posix() for path in shards.rglob("*") if path.is_file()]
    # Within a folder the index goes last.
    files.sort(key=lambda name: (posixpath.dirname(name), posixpath.basename(name) == _INDEX, name))
    hashes = {name: sha256_file(shards / name) for name in files}
    sizes = {name: (shards / name).stat().st_size for name in files}
    kind, done = {"sftp": _SFTPStore, "file": _FolderStore}.get(urlsplit(remote).scheme, _CloudStore), 0
    try:
        with closing(kind(shards, remote)) as store:
            complete = _complete_folders(store, hashes)
            for name in files:
                if posixpath.dirname(name) not in complete:
                    _put(store, name, hashes[name])
                done += sizes[name]
                tick(done, sum(sizes.values()))
    except UserError as error:
        raise UserError(f"key 'prepare.shards.remote' = {remote!r}: {error}") from None
    except Exception as error:  # each storage service has its own
        problem = f"cannot be written to ({type(error).__name__}: {first_line(error)})"
        remedy = "check the address and the access to it"
        raise UserError(f"key 'prepare.shards.remote' = {remote!r}: {problem}; {remedy}") from error
    return hashes


def _complete_folders(store: _Store, hashes: dict[str, str]) -> set[str]:
    """Return the folders that are uploaded already; refuse any other data."""
    present = store.names()
    others = sorted((present or set()) - set(hashes))
    indices = [name for name in hashes if posixpath.basename(name) == _INDEX and (present is None or name in present)]
    found = {name: store.sha256(name, may_be_missing=present is None) for name in indices}
    others += [name for name, digest in found.items() if digest not in (None, hashes[name])]
    if others:
        raise UserError(f"holds other data ({others[0]}); empty it, or set prepare.shards.remote to another folder")
    return {posixpath.dirname(name) for name, digest in found.items() if digest is not None}


def _put(store: _Store, name: str, digest: str) -> None:
    for _ in range(_ATTEMPTS):
        store.put(name)
        if store.sha256(name) == digest:
            return
    raise UserError(f"{name} arrived damaged {_ATTEMPTS} times; check the storage, then repeat the command")


class _Store:
    """A folder behind a URL. Files are read back by the library that reads them in training."""

    def __init__(self, shards: Path, remote: str) -> None:
        self.shards, self.remote = shards, remote
        self._downloader: Any = downloader_of(remote.removeprefix("file://"))

    def names(self) -> set[str] | None:
        """List the files, by their paths below the URL; None if the service cannot list."""
        raise NotImplementedError

    def put(self, name: str) -> None:
        """Upload one file."""
        raise NotImplementedError

    def sha256(self, name: str, *, may_be_missing: bool = False) -> str | None:
        """Hash an uploaded file; None if it is missing and may be."""
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / "copy"
            try:
                self._downloader.download(f"{self.remote.removeprefix('file://')}/{name}", str(copy), _SECONDS)
            except FileNotFoundError:
                if not may_be_missing:
                    raise
                return None
            return sha256_file(copy)

    def close(self) -> None:
        """Close the connection."""
        self._downloader.clean_up()


class _FolderStore(_Store):
    """A mounted folder."""

    def __init__(self, shards: Path, remote: str) -> None:
        super().__init__(shards, remote)
        self._root = Path(remote.removeprefix("file://"))
        self._root.mkdir(parents=True, exist_ok=True)

    def names(self) -> set[str] | None:
        return {path.relative_to(self._root).as_posix() for path in self._root.rglob("*") if path.is_file()}

    def put(self, name: str) -> None:
        atomic_write(self._root / name, lambda temporary: shutil.copyfile(self.shards / name, temporary))


class _CloudStore(_Store):
    """S3, GCS, OCI, Azure and the other services that Streaming uploads to."""

    def __init__(self, shards: Path, remote: str) -> None:
        super().__init__(shards, remote)
        self._uploader = CloudUploader.get((str(shards), remote), keep_local=True, exist_ok=True, retry=_ATTEMPTS)

    def names(self) -> set[str] | None:
        if not hasattr(self._uploader, "list_objects"):
            return None
        prefix = urlsplit(self.remote).path.lstrip("/") or "."
        return {posixpath.relpath(name, prefix) for name in self._uploader.list_objects("") or []}

    def put(self, name: str) -> None:
        self._uploader.upload_file(name)


class _SFTPStore(_Store):
    """An SFTP server, which Streaming reads from but cannot write to."""

    def __init__(self, shards: Path, remote: str) -> None:
        super().__init__(shards, remote)
        url = urlsplit(remote)
        self._downloader._create_ssh_client(url)  # the same keys and known hosts serve both directions
        self._client = self._downloader._ssh_client.open_sftp()
        self._client.get_channel().settimeout(_SECONDS)
        self._root = unquote(url.path)

    def names(self) -> set[str] | None:
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
        target = posixpath.join(self._root, name)
        self._make_folders(posixpath.dirname(target))
        self._client.put(str(self.shards / name), target + _PARTIAL)
        self._client.posix_rename(target + _PARTIAL, target)

    def _make_folders(self, folder: str) -> None:
        try:
            self._client.stat(folder)
        except FileNotFoundError:
            if posixpath.dirname(folder) != folder:
                self._make_folders(posixpath.dirname(folder))
            self._client.mkdir(folder)
