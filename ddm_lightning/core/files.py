"""Atomic files and folders: written under a temporary name, then renamed. Checks and hashes of files."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, SoftFileLock

from ddm_lightning.core.errors import UserError

# Errors of disks that lack an operation.
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def _flush(path: Path) -> None:
    """Sync a file or folder to disk, so that a rename never survives without the bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network disks refuse it for folders
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(handle)


@contextmanager
def _naming(path: Path, temporary: Path) -> Iterator[None]:
    """Make an ``OSError`` that names no file, or one in ``temporary``, name ``path``."""
    try:
        yield
    except OSError as error:
        named = error.filename2 or error.filename  # of a copy, the target comes second
        is_ours = named is None or str(named) == str(path) or Path(named).is_relative_to(temporary)
        if error.errno and is_ours:
            error.filename = str(path)
            error.filename2 = None

        raise


def atomic_write(
    path: Path, write: Callable[[Path], object], move: Callable[[Path, Path], object] | None = None
) -> None:
    """Call ``write`` on a temporary path beside ``path``, then ``move`` the file into place, by default by renaming.

    An exception in ``write`` leaves ``path`` unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keep the suffix: some writers (Pillow, numpy) choose a format by it or append one.
    temporary = path.with_name(f".tmp-{os.getpid()}-{threading.get_ident()}-{path.name}")
    try:
        with _naming(path, temporary):
            write(temporary)
            _flush(temporary)
            (move or os.replace)(temporary, path)
            _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def create_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, unless it exists.

    On a disk without hard links, a reader may meet it half-written.

    Raises:
        FileExistsError: it exists; if several processes try, one succeeds.
    """

    def move(temporary: Path, path: Path) -> None:
        try:
            os.link(temporary, path)
        except OSError:  # it exists, or the disk is a mounted bucket, SMB or exFAT
            with path.open("xb") as file:
                file.write(content)

    atomic_write(path, lambda temporary: temporary.write_bytes(content), move)


def locked(path: Path, seconds: float = 0.0) -> AbstractContextManager[Any]:
    """Lock ``path`` until the end of the returned context.

    A disk that cannot lock gets a file with the holder's process and host instead. If that host dies, the file stays.

    Args:
        path: file of the lock.
        seconds: time to wait for it; -1 for ever.

    Raises:
        Timeout: another process holds it.
    """
    try:
        return FileLock(path).acquire(timeout=seconds)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise

    if path.exists() and not path.stat().st_size:
        path.unlink()  # left by ``FileLock``

    return SoftFileLock(path).acquire(timeout=seconds)


def atomic_write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, atomically."""
    atomic_write(path, lambda p: p.write_text(text, encoding="utf-8"))


def atomic_write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` as indented JSON, atomically."""
    atomic_write_text(path, json.dumps(value, indent=2, sort_keys=False, allow_nan=False) + "\n")


@contextmanager
def atomic_folder(path: Path, *, is_new: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder, which replaces ``path`` unless the block raises.

    Raises:
        UserError: ``path`` exists and must not (``is_new``).
    """
    if is_new and path.exists():
        raise UserError(f"{path}: exists already; give a new folder")

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{path.name}-", dir=path.parent))
    try:
        with _naming(path, temporary):
            yield temporary
            for written in (temporary, *temporary.rglob("*")):  # safetensors lets nobody else read its files
                written.chmod(written.stat().st_mode | (0o755 if written.is_dir() else 0o644))

            move_folder(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def atomic_files(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder. Its files move into ``folder`` unless the block raises."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder))
    try:
        with _naming(folder, temporary):
            yield temporary
            for written in [file for file in temporary.rglob("*") if file.is_file()]:
                target = folder / written.relative_to(temporary)
                target.parent.mkdir(exist_ok=True)
                _flush(written)
                os.replace(written, target)

            _flush(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def move_folder(temporary: Path, path: Path) -> None:
    """Sync ``temporary`` to disk, then rename it to ``path`` on the same disk, replacing it."""
    replaced = temporary.with_name(f"{temporary.name}-replaced")
    try:
        for written in (*temporary.rglob("*"), temporary):
            _flush(written)

        if path.exists():
            os.replace(path, replaced)  # rename, because removing a large folder is slow

        os.replace(temporary, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(replaced, ignore_errors=True)


def check_file(path: Path, *, link: bool = False) -> int:
    """Check an untrusted file before it is opened, and return its size in bytes.

    Args:
        path: the file.
        link: whether to allow a link out of the file's folder, as in the Hugging Face cache.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it is a folder, pipe or device, or a link out of its folder that is not allowed.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a regular file")
    if not link and not path.resolve().is_relative_to(path.parent.resolve()):
        raise ValueError("a link that leads out of its folder")

    return found.st_size


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that others wrote.

    Raises:
        ValueError: it is not JSON, or nested too deep to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_json(path: Path, what: str, remedy: str, *, link: bool = False) -> Any:
    """Parse the JSON file ``path``.

    Args:
        path: the file.
        what: description of the file for error lines.
        remedy: ends every error line.
        link: as in ``check_file``.

    Raises:
        UserError: the file is missing, too large or not JSON, or ``check_file`` refuses it.
    """
    try:
        if check_file(path, link=link) > 64 << 20:
            raise ValueError("larger than 64 MiB")

        return parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: {what} is missing; {remedy}") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: {what} cannot be read ({error}); {remedy}") from None


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    return hash_file(path, "sha256")


def hash_file(path: Path, algorithm: str) -> str:
    """Hash of a file by an algorithm of ``hashlib``, in hexadecimal digits."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)

    return digest.hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of ``value`` in canonical JSON; equal for equal inputs."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def inside(folder: Path, relative: str, named_by: Path) -> Path:
    """Resolve ``folder / relative`` from an untrusted manifest.

    Raises:
        UserError: ``relative`` is absolute or leaves ``folder``; the line names ``named_by``.
    """
    try:
        target = (folder / relative).resolve()
        target.is_file()  # raises for a name that ``resolve`` accepts, such as one that is too long
    except (ValueError, OSError, RuntimeError):  # a null byte, too long a name, circular links
        raise UserError(f"{named_by}: path {relative!r} names no file; refuse this file or fix the path") from None

    if Path(relative).is_absolute() or not target.is_relative_to(folder.resolve()):
        raise UserError(f"{named_by}: path {relative!r} leaves its folder; refuse this file or fix the path")

    return target
