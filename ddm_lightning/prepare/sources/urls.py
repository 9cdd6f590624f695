"""Files of a source: in a local folder, or behind any URL supported by fsspec."""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from fsspec.core import has_magic
from fsspec.implementations.local import LocalFileSystem

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError, redacted
from ddm_lightning.prepare.sources.decode import one_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PARAMS = "prepare.source.params"
# Keys by which back ends tell the state of a file, best first; some have only "created".
_STATE = ["ETag", "etag", "sha256", "md5Hash", "content_md5"]
_STATE += ["LastModified", "last_modified", "mtime", "updated", "created"]
_READ_AT_ONCE = 32
# Files that are no images. All others count as images, so that those of an unknown format are reported as broken.
_NO_IMAGES = [".txt", ".caption", ".json", ".jsonl", ".csv", ".tsv", ".md", ".parquet", ".html", ".py", ".zip", ".tar"]
_NO_IMAGES += [".npz", ".safetensors"]  # caches of trainers
# Made by file managers and file servers, with thumbnails.
_NOT_OF_THE_USER = ("__MACOSX", "@eaDir", "Thumbs.db", "desktop.ini")


class Files:
    """The files under ``path``: a folder, one file, or a pattern with ``*``. Hidden files are skipped.

    What exists under its own name is no pattern (``tars [1]``). A name in the data, or a link in the folder, that leads
    out of the folder is refused: whoever made the data could read any file of whoever prepares it.

    Args:
        path: local, or a URL.
        key: key or option that gives it, for messages.
        follow_links: whether to follow links of a local folder that lead out of it.

    Raises:
        UserError: ``path`` does not exist or cannot be read; its protocol is unknown or needs a package.
    """

    _pattern = ""
    _query = ""
    _is_folder = False

    def __init__(self, path: str, key: str = f"key '{PARAMS}.path'", follow_links: bool = False) -> None:
        self.path = path
        self._key = key
        self._follow_links = follow_links
        filesystem, inner = self._filesystem()
        with self.reading():
            try:
                info = filesystem.info(inner)
            except FileNotFoundError as error:
                cause = remote.cause_of(error)
                if cause is not error:
                    raise cause from None

                self._root, self._pattern = _split_pattern(filesystem, inner)
                return

        # A web server reports everything as a file. A link to one file is what the user has named.
        self._is_folder = info["type"] == "directory" or (str(info["name"]).startswith("http") and path.endswith("/"))
        self._follow_links = follow_links or not self._is_folder
        if inner.startswith("http"):
            inner, mark, query = inner.partition("?")
            self._query = mark + query

        self._root = inner.rpartition("/")[0]
        if self._is_folder:
            self._root = inner.rstrip("/")

    @property
    def is_local(self) -> bool:
        """Whether the files are on this machine and can be memory-mapped."""
        return isinstance(self._filesystem()[0], LocalFileSystem)

    @cached_property
    def states(self) -> dict[str, str]:
        """State of each file (size and ETag or time), by its path relative to the folder; sorted.

        Raises:
            UserError: the folder cannot be listed, or holds a link that leads out of it.
        """
        filesystem, inner = self._filesystem()
        states = {}
        with self.reading():
            if self._pattern:
                found = filesystem.glob(self._pattern, detail=True).values()
            elif self._is_folder:
                found = remote.walk(filesystem, inner)
            else:
                found = [filesystem.info(inner)]

            for path, info in self._targets(found):
                if info["type"] == "file":
                    state = next((f"{key} {info[key]}" for key in _STATE if info.get(key) is not None), "")
                    states[self._relative(path)] = f"{info.get('size')} bytes, {state}"

        return dict(sorted(states.items()))

    def _targets(
        self, infos: Iterable[dict[str, Any]], folders: tuple[str, ...] = ()
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield path and information of each file that is not hidden; for a link, the information of its target."""
        filesystem = self._filesystem()[0]
        root = os.path.realpath(self._root)
        for info in infos:
            path = info["name"]
            if any(map(_is_hidden, self._relative(path).split("/"))):
                continue

            if info.get("islink") or info["type"] == "link":  # SFTP has only the type
                real = os.path.realpath(path)
                is_outside = self.is_local and not PurePosixPath(real).is_relative_to(root)
                if is_outside and not self._follow_links:
                    raise UserError(
                        f"{self._key}: {path} is a link out of this folder, to {real}; remove it, or set "
                        f"{PARAMS}.follow_links=true"
                    )

                if is_outside and filesystem.isdir(path) and real not in folders:
                    yield from self._targets(remote.walk(filesystem, path), (*folders, real))

                try:
                    info = filesystem.info(path)
                except OSError:  # a dead or circular link, found broken later
                    info = {**info, "type": "file"}

            yield path, info

    @property
    def images(self) -> list[str]:
        """Relative paths of the files that count as images, sorted."""
        return [name for name in self.states if not name.lower().endswith(tuple(_NO_IMAGES))]

    def ending(self, *suffixes: str) -> list[str]:
        """List the relative paths with one of ``suffixes``, sorted.

        Raises:
            UserError: there is none.
        """
        names = [name for name in self.states if name.lower().endswith(suffixes)]
        if not names:
            raise UserError(f"{self._key}: no file in {self.shown()} ends in {' or '.join(suffixes)}; change the path")

        return names

    def open(self, relative: str) -> Any:
        """Open a file for reading and seeking.

        Raises:
            UserError: the file cannot be opened; also from any later read that fails, because a parser might take a
                broken connection for damage.
        """
        filesystem, _ = self._filesystem()
        with self.reading(relative):
            file = filesystem.open(self.inner_path(relative), "rb")

        read = file.read

        def checked(size: int = -1) -> bytes:
            with self.reading(relative):
                return read(size)

        file.read = checked
        return file

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

    def _relative(self, path: str) -> str:
        # An object store's name may begin with "/".
        return path.removeprefix(f"{self._root}/").removesuffix(self._query)

    def inner_path(self, relative: str) -> str:
        """Return the path in the form of the file system.

        Raises:
            PermissionError: it leads out of the folder.
        """
        path = f"{self._root}/{relative}{self._query}"
        if self.is_local and relative.startswith("/"):
            path = relative

        resolved = posixpath.normpath if self._follow_links or not self.is_local else os.path.realpath
        if not PurePosixPath(resolved(path)).is_relative_to(resolved(self._root)):
            raise PermissionError(f"{relative!r} leads out of {self.shown()}, as {self._key} has it")

        return path

    def shown(self, relative: str = "") -> str:
        """Quote the URL for a message, without its password."""
        url = redacted(self.path)
        return repr(f"{url.rstrip('/')}: {relative}" if relative else url)

    @contextmanager
    def reading(self, relative: str = "") -> Iterator[None]:
        """Turn any error of a file, or of the folder, into a ``UserError``."""
        try:
            yield
        except UserError:
            raise
        except Exception as raised:  # back ends raise anything; also an unknown protocol, or a missing package
            error = remote.cause_of(raised)
            if isinstance(error, FileNotFoundError):
                raise UserError(f"{self._key}: {self.shown(relative)} does not exist; change the path") from raised

            raise UserError(
                f"{self._key}: {self.shown(relative)} cannot be read: {one_line(error)}; fix the address or the access"
            ) from raised

    def _content_or_error(self, relative: str) -> bytes | Exception:
        try:
            inner = self.inner_path(relative)
        except (PermissionError, ValueError) as error:  # ValueError: a null byte
            return error

        with self.reading(relative):
            try:
                return remote.attempt(self.path, lambda files, _: files.cat_file(inner))
            except OSError as error:
                if self.is_local or isinstance(error, FileNotFoundError):
                    return error

                raise

    def _filesystem(self) -> tuple[AbstractFileSystem, str]:
        # Not kept here: fsspec caches it, and must make another one after a fork.
        with self.reading():
            return remote.filesystem(self.path)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in _NOT_OF_THE_USER


def content_or_error(url: str) -> bytes | Exception:
    """Read the file of a URL; of many hosts, some fail."""
    try:
        filesystem, inner = remote.filesystem(url)
        return filesystem.cat_file(inner)
    except Exception as error:  # noqa: BLE001  each fsspec back end raises its own errors
        return error


def _split_pattern(filesystem: AbstractFileSystem, inner: str) -> tuple[str, str]:
    """Return the folder above a pattern, and the pattern with escaped names of folders that exist as such.

    Raises:
        FileNotFoundError: ``inner`` is no pattern.
    """
    pieces = inner.split("/")
    for number, piece in enumerate(pieces):
        if has_magic(piece) and not filesystem.exists("/".join(pieces[: number + 1])):
            root = "/".join(pieces[:number])
            return root, "/".join([glob.escape(root), *pieces[number:]])

    raise FileNotFoundError(inner)
