"""Files behind a URL or in a folder: the one module that reaches other machines, by fsspec.

``s3://``, ``sftp://``, ``file://`` and paths work as they are; fsspec names the package that any other address needs
(``gs://``: gcsfs, ``hf://``: huggingface_hub, ``az://``: adlfs).
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ddm_lightning.core.errors import UserError, first_line, redacted, with_password
from ddm_lightning.core.files import atomic_write, create_file

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_Result = TypeVar("_Result")
# Seconds without data after which a transfer fails.
SILENT_SECONDS = 20.0
_ATTEMPTS = 3
_NUM_THREADS = 8
# Ending of a file that is being sent.
_PARTIAL = ".partial"
# Not urllib's: "#" and "?" in a path are part of a name, and names of hosts in ~/.ssh/config have capitals.
_SSH = re.compile(
    r"\w+://((?P<name>[^/:@]*)(:(?P<password>[^/]*))?@)?(?P<host>\[[^/]*\]|[^/:]+)(:(?P<port>\d+))?(?P<path>/.*)?",
    re.DOTALL,
)
# Own file systems that this process has used.
_used: set[Any] = set()


def filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL or path, and the path in it. fsspec keeps one per process and thread.

    Raises:
        Exception: the protocol is unknown or needs a package, or there is no connection.
    """
    scheme, _, rest = url.partition("://")
    if not is_url(url) or scheme == "file":  # fsspec would take "::" in a name for a chain of file systems
        return LocalFileSystem(), str(Path(rest or url).expanduser().absolute())

    url = with_password(url)
    if scheme in ("http", "https"):
        server = fsspec.filesystem(scheme)
        server.encode_url = _as_written
        return server, url

    if scheme not in ("s3", "sftp", "ssh"):
        return url_to_fs(url)

    from ddm_lightning.core.filesystems import S3FileSystem, SFTPFileSystem

    _used.update((S3FileSystem, SFTPFileSystem))
    if scheme == "s3":
        return S3FileSystem(SILENT_SECONDS), rest.rstrip("/")

    parts = _SSH.fullmatch(url)
    if parts is None:
        raise ValueError("is not of the form sftp://user@host:port/path")

    name, password, path = (value and unquote(value) for value in parts.group("name", "password", "path"))
    login = {"port": parts["port"] and int(parts["port"]), "username": name, "password": password}
    return SFTPFileSystem(parts["host"].strip("[]"), SILENT_SECONDS, **login), path or ""


def _as_written(url: str) -> Any:
    """Encode what a URL cannot hold, and nothing else: fsspec decodes ``%7E``, which spoils signed URLs."""
    from yarl import URL

    return URL(quote(url, safe="!#$%&'()*+,/:;=?@[]~"), encoded=True)


@contextmanager
def reaching(what: str = "key 'remote'") -> Iterator[None]:
    """Turn an ``OSError`` of a store into one line for the user, which begins with ``what``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {first_line(error)}; check the address and the access to it") from error


def is_url(address: str | Path) -> bool:
    """Whether an address is a URL and not a path."""
    return "://" in str(address)


def get(url: str, path: Path) -> None:
    """Fetch a file; ``path`` appears whole or not at all.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: it cannot be fetched, after several attempts; the message begins with the URL.
    """

    def fetch(remote: AbstractFileSystem, inner: str) -> None:
        # fsspec's own reports a local file that may not be read as missing.
        copy = shutil.copyfile if isinstance(remote, LocalFileSystem) else remote.get_file
        atomic_write(path, lambda temporary: copy(inner, str(temporary)))

    attempt(url, fetch)


def download(url: str, path: Path) -> None:
    """Fetch a file whose hash the caller checks, without waiting for the disk as ``get`` does.

    An error may leave a part of it.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: as ``get``.
    """
    attempt(url, lambda remote, inner: remote.get_file(inner, str(path)))


def put(path: Path, url: str) -> None:
    """Send a file; it appears at ``url`` whole or not at all.

    Raises:
        OSError: it cannot be sent, after several attempts; the message begins with the URL.
    """

    def send(remote: AbstractFileSystem, inner: str) -> None:
        if isinstance(remote, LocalFileSystem):
            atomic_write(Path(inner), lambda temporary: shutil.copyfile(path, temporary))
            return

        num_bytes = path.stat().st_size
        if remote.protocol == "sftp":
            remote.put_file(str(path), inner + _PARTIAL)
            remote.mv(inner + _PARTIAL, inner)
        else:  # an object store shows no object before it is complete
            remote.put_file(str(path), inner)

        # Compare sizes: a proxy may answer every request with a page and 200. A log may grow meanwhile.
        if not num_bytes <= remote.info(inner)["size"] <= path.stat().st_size:
            raise ConnectionError("the store does not hold what was sent")

    attempt(url, send)


def put_folder(folder: Path, url: str, last: str, before: Callable[[], object]) -> None:
    """Send the files of a folder, the one named ``last`` at the end.

    Args:
        folder: holds no folders.
        url: of its copy.
        last: name of the file that makes the copy count.
        before: called before each file.

    Raises:
        OSError: as ``put``.
    """
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == last, path.name)):
        before()
        put(path, f"{url}/{path.name}")


def read(url: str) -> bytes:
    """Return the content of a small file.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: as ``get``.
    """
    return attempt(url, lambda remote, inner: remote.cat_file(inner))


def write(url: str, content: bytes) -> None:
    """Write a small file; it appears at ``url`` whole or not at all.

    Raises:
        OSError: as ``put``.
    """
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "content"
        path.write_bytes(content)
        put(path, url)


def create(url: str, content: bytes) -> bool:
    """Write a small file unless there is one already; of several writers, one succeeds.

    Folders, SFTP and S3's conditional writes decide in one step. A store without such a step may let two writers that
    come within a second both succeed.

    Returns:
        Whether the file is this writer's, whose ``content`` must be unlike any other's.

    Raises:
        OSError: as ``put``.
    """

    def claim(remote: AbstractFileSystem, inner: str) -> bool:
        with suppress(FileExistsError):
            if isinstance(remote, LocalFileSystem):
                create_file(Path(inner), content)
            else:
                remote.pipe_file(inner, content, mode="create")

        return bool(remote.cat_file(inner) == content)  # an earlier attempt may have succeeded without an answer

    return attempt(url, claim)


def remove(url: str) -> None:
    """Remove a folder and the files below it; nothing happens if it does not exist.

    Raises:
        OSError: it cannot be removed; the message begins with the URL.
    """

    def delete(remote: AbstractFileSystem, inner: str) -> None:
        for name in files(url):
            remote.rm_file(f"{inner}/{name}")

        with suppress(OSError):  # an object store has no folders
            remote.rmdir(inner)

    attempt(url, delete)


def files(url: str, recursive: bool = True) -> dict[str, int]:
    """Return bytes of each file below ``url``, by its relative path; nothing if there is no such folder.

    Without ``recursive``, files in folders below it are skipped.

    Raises:
        OSError: it cannot be listed, after several attempts; the message begins with the URL.
    """

    def listed(remote: AbstractFileSystem, root: str) -> dict[str, int]:
        folder = f"{root.rstrip('/')}/"
        found = {}
        try:
            for entry in walk(remote, root, recursive):
                name = entry["name"].removeprefix(folder)
                # An object store may hold what no folder can, such as "a//b" and "a/../b".
                is_path = os.path.normpath(f"/x/{name}") == f"/x/{name}"
                if is_path and not name.endswith(_PARTIAL):
                    found[name] = entry["size"]
        except FileNotFoundError:
            return {}

        return found

    return attempt(url, listed)


def walk(remote: AbstractFileSystem, folder: str, recursive: bool = True) -> Iterator[dict[str, Any]]:
    """Yield what fsspec tells of each file below a folder.

    fsspec's own walk takes a broken connection, or a folder that cannot be read, for an empty folder.
    """
    for entry in remote.ls(folder, detail=True):
        if entry["type"] == "directory":
            if recursive:
                yield from walk(remote, entry["name"])
        elif not entry["name"].endswith("/"):  # an object store's mark of a folder
            yield entry


def in_threads(function: Callable[..., _Result], items: Iterable[Any]) -> list[_Result]:
    """Map eight items at a time: transfers, reading and hashing release Python's lock. Threads keep connections."""
    pool = _threads(os.getpid())
    try:
        return list(pool.map(function, items))
    except Exception:
        raise
    except BaseException:  # if a signal comes while a thread starts, Python's exit does not know it, and hangs
        _threads.cache_clear()
        pool.shutdown(wait=False)
        raise


@lru_cache(maxsize=1)
def _threads(_process: int) -> ThreadPoolExecutor:  # threads do not survive a fork
    return ThreadPoolExecutor(_NUM_THREADS)


def disconnect() -> None:
    """Forget this process's connections: before a fork, after an error, when all is done. A transfer makes new ones."""
    for kind in _used:
        kind.clear_instance_cache()


def attempt(url: str, action: Callable[[Any, str], _Result]) -> _Result:
    """Call ``action`` with the file system of ``url`` and the path in it; if a store fails, several times.

    Raises:
        FileNotFoundError: nothing is there.
        OSError: it failed, each time if it is a store; the message begins with the URL.
    """
    for number in range(_ATTEMPTS):
        try:
            remote, inner = filesystem(url)
            remote.invalidate_cache()  # listings that are kept may be old
            return action(remote, inner)
        except Exception as raised:  # each file system raises its own
            error = cause_of(raised)
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(f"{redacted(url)}: does not exist") from raised

            is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            is_final = isinstance(error, (ImportError, ValueError, PermissionError)) or is_full or not is_url(url)
            if is_final or number == _ATTEMPTS - 1:
                kind = OSError if is_final else ConnectionError
                raise kind(redacted(f"{url}: {_reason(error)}")) from raised

        disconnect()
        time.sleep(2**number + random.random() / 2)

    raise AssertionError("the last attempt returns or raises")


def cause_of(error: BaseException) -> BaseException:
    """The error itself, or its cause where fsspec's HTTP reports, say, a refused connection as a missing file."""
    cause = error.__cause__
    if cause and "aiohttp" in type(cause).__module__:
        return cause

    return error


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"silent for {SILENT_SECONDS:g} s"
    if isinstance(error, EOFError):  # of paramiko, without a message
        return "the connection was closed"

    last = getattr(error, "last_exception", None)  # of boto3, whose own message is the number of attempts
    if last is None:
        return first_line(error)

    return f"{first_line(error)}: {first_line(last)}"
