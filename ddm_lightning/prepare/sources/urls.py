"""Files of a source: in a local folder, or behind any URL supported by fsspec."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO

from fsspec.core import has_magic
from fsspec.implementations.local import LocalFileSystem

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.sources.decode import one_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# Keys by which back ends tell the state of a file, best first; some have only "created".
_STATE = ["ETag", "etag", "sha256", "md5Hash", "content_md5"]
_STATE += ["LastModified", "last_modified", "mtime", "updated", "created"]
_READ_AT_ONCE = 32


class Files:
    """The files under ``path``: a folder, one file, or a pattern with ``*``. Hidden files are skipped.

    Args:
        path: local, or a URL.
        param: param of the source that gives it, for messages.

    Raises:
        UserError: ``path`` does not exist or cannot be read; its protocol is unknown or needs a package.
    """

    def __init__(self, path: str, param: str = "path") -> None:
        self.path, self._key = path, f"key 'prepare.source.params.{param}'"
        filesystem, inner = self._filesystem()
        if has_magic(inner):
            self._root = re.split(r"[*?\[]", inner)[0].rpartition("/")[0]
            return
        with self.reading():
            info = filesystem.info(inner)
        # A web server reports everything as a file.
        self._is_folder = info["type"] == "directory" or (str(info["name"]).startswith("http") and path.endswith("/"))
        self._root = inner.rstrip("/") if self._is_folder else inner.rpartition("/")[0]

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine and can be memory-mapped."""
        return isinstance(self._filesystem()[0], LocalFileSystem)

    @cached_property
    def states(self) -> dict[str, str]:
        """State of each file (size and ETag or time), by its path relative to the folder; sorted.

        Raises:
            UserError: the folder cannot be listed.
        """
        filesystem, inner = self._filesystem()
        with self.reading():
            if has_magic(inner):
                found = filesystem.glob(inner, detail=True)
            elif self._is_folder:
                found = {info["name"]: info for info in remote.walk(filesystem, inner)}
            else:
                found = {inner: filesystem.info(inner)}
        states = {}
        for path, info in found.items():
            info = _follow_link(filesystem, path, info)
            name = path.removeprefix(f"{self._root}/")  # an object store's may begin with "/"
            is_hidden = any(part.startswith(".") or part in ("__MACOSX", "Thumbs.db") for part in name.split("/"))
            if info["type"] == "file" and not is_hidden:
                state = next((f"{key} {info[key]}" for key in _STATE if info.get(key) is not None), "")
                states[name] = f"{info.get('size')} bytes, {state}"
        return dict(sorted(states.items()))

    def ending(self, *suffixes: str) -> list[str]:
        """List the relative paths with one of ``suffixes``, sorted.

        Raises:
            UserError: there is none.
        """
        names = [name for name in self.states if name.lower().endswith(suffixes)]
        if not names:
            raise UserError(f"{self._key}: no file in {self.shown()} ends in {' or '.join(suffixes)}; change the path")
        return names

    def open(self, relative: str) -> CheckedFile:
        """Open a file for reading and seeking.

        Raises:
            UserError: the file cannot be opened; also from any later read that fails.
        """
        filesystem, _ = self._filesystem()
        with self.reading(relative):
            return CheckedFile(filesystem.open(self.inner_path(relative), "rb"), self, relative)

    def content(self, relative: str) -> bytes:
        """Read a whole file.

        Raises:
            UserError: the file cannot be read.
        """
        with self.open(relative) as file:
            return file.read()

    def contents(self, paths: Sequence[str]) -> Iterator[bytes | Exception]:
        """Yield each file's content, or the error of a file that is damaged or gone; several are read at a time.

        Raises:
            UserError: a store fails, after several attempts.
        """
        for start in range(0, len(paths), _READ_AT_ONCE):
            yield from remote.in_threads(self._content_or_error, paths[start : start + _READ_AT_ONCE])

    def inner_path(self, relative: str) -> str:
        """Return the path in the form of the file system."""
        return f"{self._root}/{relative}"

    def shown(self, relative: str = "") -> str:
        """Quote the URL for a message, without its password."""
        url = remote.shown(self.path)
        return repr(f"{url.rstrip('/')}: {relative}" if relative else url)

    @contextmanager
    def reading(self, relative: str = "") -> Iterator[None]:
        """Turn any error of a file, or of the folder, into a ``UserError``."""
        try:
            yield
        except Exception as raised:  # back ends raise anything; also an unknown protocol, or a missing package
            error = remote.cause_of(raised)
            if isinstance(error, FileNotFoundError):
                raise UserError(f"{self._key}: {self.shown(relative)} does not exist; change the path") from raised
            raise UserError(
                f"{self._key}: {self.shown(relative)} cannot be read: {one_line(error)}; fix the address or the access"
            ) from raised

    def _content_or_error(self, relative: str) -> bytes | Exception:
        with self.reading(relative):
            try:
                return remote.attempt(self.path, lambda files, _: files.cat_file(self.inner_path(relative)))
            except OSError as error:
                if self.is_local or isinstance(error, FileNotFoundError):
                    return error
                raise

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        # Not kept here: fsspec caches it, and must make another one after a fork.
        with self.reading():
            return remote.filesystem(self.path)


def content_or_error(url: str) -> bytes | Exception:
    """Read the file of a URL; of many hosts, some fail."""
    try:
        filesystem, inner = remote.filesystem(url)
        return filesystem.cat_file(inner)
    except Exception as error:  # noqa: BLE001  each fsspec back end raises its own errors
        return error


def _follow_link(filesystem: AbstractFileSystem, name: str, info: dict[str, Any]) -> dict[str, Any]:
    """Return the target's information; a dead or circular link counts as a file, found broken later."""
    try:
        return filesystem.info(name) if info.get("islink") or info["type"] == "link" else info  # SFTP has only the type
    except OSError:
        return {**info, "type": "file"}


class CheckedFile(io.RawIOBase):
    """A file whose failed reads raise ``UserError``: a parser might take a broken connection for damage."""

    def __init__(self, file: BinaryIO, files: Files, relative: str) -> None:
        super().__init__()
        self._file = file
        self._files = files
        self._relative = relative
        for name in ("seek", "tell", "readable", "seekable"):
            setattr(self, name, getattr(file, name))

    def read(self, size: int = -1, /) -> bytes:
        """Read bytes."""
        with self._files.reading(self._relative):
            return self._file.read(size)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()
