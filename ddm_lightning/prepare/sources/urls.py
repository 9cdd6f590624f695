"""Files of a source: in a local folder, or behind any URL supported by fsspec."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO

from fsspec.core import has_magic, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.records import Part

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_KEY = "key 'prepare.source.params.path'"
# Names of back ends for the state of a file, best first; some have only "created".
_STATE = ["ETag", "etag", "sha256", "md5Hash", "content_md5"]
_STATE += ["LastModified", "last_modified", "mtime", "updated", "created"]
_READ_AT_ONCE = 32
BLOCK_SIZE = 512


class Files:
    """The files under ``path``: a folder, one file, or a pattern with ``*``. Hidden files are skipped.

    Raises:
        UserError: ``path`` does not exist or cannot be read; its protocol is unknown or needs a package.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        filesystem, inner = self._filesystem()
        if has_magic(inner):
            self._root = re.split(r"[*?\[]", inner)[0].rpartition("/")[0]
            return
        try:
            info = filesystem.info(inner)
        except Exception as error:
            raise self.unreadable(error) from error
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
        try:
            if has_magic(inner):
                found = filesystem.glob(inner, detail=True)
            elif self._is_folder:
                found = filesystem.find(inner, detail=True)
            else:
                found = {inner: filesystem.info(inner)}
        except Exception as error:
            raise self.unreadable(error) from error
        states = {}
        for path, info in found.items():
            info = _follow_link(filesystem, path, info)
            name = path.removeprefix(self._root).lstrip("/")
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
            raise UserError(f"{_KEY}: no file in {self.shown()} ends in {' or '.join(suffixes)}; change the path")
        return names

    def open(self, relative: str) -> WatchedFile:
        """Open a file for reading and seeking.

        Raises:
            UserError: it cannot be opened.
        """
        try:
            file: BinaryIO = self._filesystem()[0].open(self.inner_path(relative), "rb")
        except Exception as error:
            raise self.unreadable(error, relative) from error
        return WatchedFile(file, lambda error: self.unreadable(error, relative))

    def content(self, relative: str) -> bytes:
        """Read a whole file. Errors of the back end pass through."""
        content: bytes = self._filesystem()[0].cat_file(self.inner_path(relative))
        return content

    def contents(self, paths: Sequence[str]) -> Iterator[bytes | Exception]:
        """Yield each file's content, or the error. Remote files are fetched several at a time."""
        filesystem, _ = self._filesystem()
        for start in range(0, len(paths), _READ_AT_ONCE):
            batch = [self.inner_path(path) for path in paths[start : start + _READ_AT_ONCE]]
            # cat() would take brackets in a name for a pattern.
            yield from filesystem.cat_ranges(batch, None, None, on_error="return")

    def inner_path(self, relative: str) -> str:
        """Return the path in the form of the file system."""
        return f"{self._root}/{relative}"

    def shown(self, relative: str = "") -> str:
        """Quote the URL for a message, without its password."""
        url = re.sub(r"(://[^/:@]*):[^/@]*@", r"\1:***@", self.path)
        return repr(f"{url.rstrip('/')}: {relative}" if relative else url)

    def unreadable(self, error: Exception, relative: str = "") -> UserError:
        """Return the error line for a file or folder that cannot be read."""
        if isinstance(error, FileNotFoundError):
            return UserError(f"{_KEY}: {self.shown(relative)} does not exist; change the path")
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        return UserError(f"{_KEY}: {self.shown(relative)} cannot be read: {problem}; fix the address or the access")

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        # Not kept here: fsspec caches it, and must make another one after a fork.
        try:
            filesystem, inner = url_to_fs(self.path)
        except ImportError as error:
            package = getattr(error.__cause__, "name", None) or error.name or str(error)
            raise UserError(
                f"{_KEY}: {self.shown()} needs the package {package!r}; run pip install {package}"
            ) from error
        except ValueError as error:
            raise UserError(
                f"{_KEY}: {self.shown()} has a protocol unknown to fsspec; give a local path, or a URL such as "
                "s3://, gs://, hf://, sftp:// or https://"
            ) from error
        except Exception as error:
            raise self.unreadable(error) from error
        return filesystem, inner


def _follow_link(filesystem: AbstractFileSystem, name: str, info: dict[str, Any]) -> dict[str, Any]:
    """Return the target's information; a dead link counts as a file, found missing later."""
    try:
        return filesystem.info(name) if info.get("islink") else info
    except FileNotFoundError:
        return {**info, "type": "file"}


class WatchedFile(io.RawIOBase):
    """A file that remembers a failed read: a parser may mistake a broken connection for damage."""

    def __init__(self, file: BinaryIO, as_user_error: Callable[[Exception], UserError]) -> None:
        super().__init__()
        self._file, self._as_user_error = file, as_user_error
        self._failure: Exception | None = None
        self.seek, self.tell = file.seek, file.tell  # type: ignore[method-assign]

    def read(self, size: int = -1, /) -> bytes:
        """Read bytes."""
        return self._watched(self._file.read, size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line; ``io``'s own method would read byte by byte."""
        return self._watched(self._file.readline, -1 if size is None else size)

    def _watched(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except Exception as error:
            self._failure = error
            raise

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def raise_failure(self) -> None:
        """Tell a broken connection from a parser's error.

        Raises:
            UserError: a read has failed.
        """
        if self._failure is not None:
            raise self._as_user_error(self._failure) from self._failure


def read_anywhere(url: str) -> bytes:
    """Read the file at a local path or fsspec URL. Errors of the back end pass through."""
    filesystem, inner = url_to_fs(url)
    content: bytes = filesystem.cat_file(inner)
    return content


def is_absolute(path: str) -> bool:
    """Whether ``path`` is a URL or starts at the root."""
    return "://" in path or path.startswith("/")


def block_parts(num_samples: int, fingerprint: str, prefix: str = "block") -> list[Part]:
    """Divide samples 0 to ``num_samples`` - 1 into blocks of ``BLOCK_SIZE``, the last one shorter.

    A block is named ``<prefix>-<number of its first sample>``, so a set that grows at its end keeps its parts.
    ``fingerprint`` is common to all samples, such as a version.
    """
    parts = []
    for start in range(0, num_samples, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, num_samples)
        where = {"start": start, "stop": stop}
        parts.append(Part(f"{prefix}-{start:09}", f"{fingerprint}; samples {start} to {stop}", stop - start, where))
    return parts


def block_of(part: Part) -> range:
    """Return the sample numbers of a part of ``block_parts``."""
    return range(part.where["start"], part.where["stop"])
