"""Files of a source, in a local folder or behind any URL that fsspec knows."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, BinaryIO

from fsspec.core import has_magic, url_to_fs

from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.records import Part

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_KEY = "key 'prepare.source.params.path'"
# What back ends call the state of a file, best first; "created" is all that some have.
_STATE = (
    "ETag",
    "etag",
    "sha256",
    "md5Hash",
    "content_md5",
    "LastModified",
    "last_modified",
    "mtime",
    "updated",
    "created",
)
_READ_AT_ONCE = 32


class Files:
    """The files under ``path``: a folder, one file, or a pattern with ``*``; hidden ones are left out.

    Raises:
        UserError: ``path`` does not exist, cannot be read, or its protocol is unknown or needs a package.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        filesystem, inner = self._filesystem()
        if has_magic(inner):
            self._root = inner[: re.search(r"[*?\[]", inner).start()].rpartition("/")[0]  # type: ignore[union-attr]
            return
        try:
            info = filesystem.info(inner)
        except Exception as error:
            raise self.unreadable(error) from error
        # A web server calls everything a file.
        self._is_folder = info["type"] == "directory" or (str(info["name"]).startswith("http") and path.endswith("/"))
        self._root = inner.rstrip("/") if self._is_folder else inner.rpartition("/")[0]

    @property
    def is_local(self) -> bool:
        """Whether the files lie on this machine and can be memory-mapped."""
        return "file" in _protocols(self._filesystem()[0])

    @cached_property
    def states(self) -> dict[str, str]:
        """Path relative to the folder -> what changes when the file does (size and ETag or time); sorted.

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
        found = {name: _followed(filesystem, name, info) for name, info in found.items()}
        states = {self._relative(name): _state(info) for name, info in found.items() if info["type"] == "file"}
        return {name: states[name] for name in sorted(states) if not _is_hidden(name)}

    def ending(self, *suffixes: str) -> list[str]:
        """Relative paths of the files that end in one of ``suffixes``, sorted.

        Raises:
            UserError: there is none.
        """
        names = [name for name in self.states if name.lower().endswith(suffixes)]
        if not names:
            raise UserError(f"{_KEY}: no file that ends in {' or '.join(suffixes)} in {self.shown()}; change the path")
        return names

    def open(self, relative: str) -> WatchedFile:
        """The file, to be read from the start; it can seek.

        Raises:
            UserError: it cannot be opened.
        """
        filesystem, _ = self._filesystem()
        try:
            file: BinaryIO = filesystem.open(self.inner_path(relative), "rb")
        except Exception as error:
            raise self.unreadable(error, relative) from error
        return WatchedFile(file, lambda error: self.unreadable(error, relative))

    def content(self, relative: str) -> bytes:
        """What the file holds. Raises what its back end raises."""
        content: bytes = self._filesystem()[0].cat_file(self.inner_path(relative))
        return content

    def contents(self, paths: Sequence[str]) -> Iterator[bytes | Exception]:
        """What each file holds, or why it cannot be read; remote ones are fetched several at a time."""
        filesystem, _ = self._filesystem()
        for start in range(0, len(paths), _READ_AT_ONCE):
            batch = [self.inner_path(path) for path in paths[start : start + _READ_AT_ONCE]]
            # cat() would take brackets in a name for a pattern.
            yield from filesystem.cat_ranges(batch, None, None, on_error="return")

    def inner_path(self, relative: str) -> str:
        """The file's path as its file system writes it."""
        return f"{self._root}/{relative}"

    def shown(self, relative: str = "") -> str:
        """The URL for a message, without a password."""
        url = re.sub(r"(://[^/:@]*):[^/@]*@", r"\1:***@", self.path)
        return repr(f"{url.rstrip('/')}: {relative}" if relative else url)

    def unreadable(self, error: Exception, relative: str = "") -> UserError:
        """The line for a file or folder that cannot be read."""
        if isinstance(error, FileNotFoundError):
            return UserError(f"{_KEY}: {self.shown(relative)} does not exist; change the path")
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        return UserError(
            f"{_KEY}: {self.shown(relative)} cannot be read: {problem}; mend the address or the access to it"
        )

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        # Asked for anew each time: fsspec keeps it, and makes another one after a fork, as it has to be.
        try:
            filesystem, inner = url_to_fs(self.path)
        except ImportError as error:
            package = getattr(error.__cause__, "name", None) or error.name or str(error)
            raise UserError(
                f"{_KEY}: {self.shown()} needs the package {package!r}; install it with: pip install {package}"
            ) from error
        except ValueError as error:
            raise UserError(
                f"{_KEY}: {self.shown()} has a protocol that fsspec does not know; give a local path, or a URL such as "
                "s3://, gs://, hf://, sftp:// or https://"
            ) from error
        except Exception as error:
            raise self.unreadable(error) from error
        return filesystem, inner

    def _relative(self, name: str) -> str:
        return name.removeprefix(self._root).lstrip("/")


class WatchedFile(io.RawIOBase):
    """A file that remembers what stopped it: a parser that reads from it may take a cut connection for damage."""

    def __init__(self, file: BinaryIO, as_user_error: Callable[[Exception], UserError]) -> None:
        super().__init__()
        self._file, self._as_user_error = file, as_user_error
        self._failure: Exception | None = None

    def read(self, size: int = -1, /) -> bytes:
        """As any file."""
        return self._watched(self._file.read, size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """As any file; ``io``'s own would ask for one byte after the other."""
        return self._watched(self._file.readline, -1 if size is None else size)

    def _watched(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except Exception as error:
            self._failure = error
            raise

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """As any file."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """As any file."""
        return self._file.tell()

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """As any file."""
        self._file.close()
        super().close()

    def raise_failure(self) -> None:
        """Tell a parser's error from that of the network.

        Raises:
            UserError: reading has failed before.
        """
        if self._failure is not None:
            raise self._as_user_error(self._failure) from self._failure


def read_anywhere(url: str) -> bytes:
    """What a local path or an fsspec URL holds. Raises what its back end raises."""
    filesystem, inner = url_to_fs(url)
    content: bytes = filesystem.cat_file(inner)
    return content


def is_absolute(path: str) -> bool:
    """Whether ``path`` is a URL or starts at the root."""
    return "://" in path or path.startswith("/")


def _protocols(filesystem: AbstractFileSystem) -> tuple[str, ...]:
    return (filesystem.protocol,) if isinstance(filesystem.protocol, str) else tuple(filesystem.protocol)


def _followed(filesystem: AbstractFileSystem, name: str, info: dict[str, Any]) -> dict[str, Any]:
    """What a link leads to; a dead one counts as a file, which will be missing."""
    try:
        return filesystem.info(name) if info.get("islink") else info
    except FileNotFoundError:
        return {**info, "type": "file"}


def _state(info: dict[str, Any]) -> str:
    state = next((f"{name} {info[name]}" for name in _STATE if info.get(name) is not None), "")
    return f"{info.get('size')} bytes, {state}"


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(".") or part in ("__MACOSX", "Thumbs.db") for part in relative.split("/"))


BLOCK_SIZE = 512


def block_parts(num_samples: int, fingerprint: str, prefix: str = "block") -> list[Part]:
    """Samples 0 to ``num_samples`` - 1 in blocks, the last one shorter.

    A block is named ``<prefix>-<number of its first sample>``, whatever else there is, so that a set that grows at
    its end keeps the parts it had. ``fingerprint`` is of all samples alike, such as a version.
    """
    parts = []
    for start in range(0, num_samples, BLOCK_SIZE):
        stop = min(start + BLOCK_SIZE, num_samples)
        where = {"start": start, "stop": stop}
        parts.append(Part(f"{prefix}-{start:09}", f"{fingerprint}; samples {start} to {stop}", stop - start, where))
    return parts


def block_of(part: Part) -> range:
    """The numbers of the samples in a part of ``block_parts``."""
    return range(part.where["start"], part.where["stop"])
