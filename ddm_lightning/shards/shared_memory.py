"""What a killed process of this member left in shared memory, removed at the member's next start.

Streaming names its shared memory by a number that is the machine's, not the run's, and its own cleaning
(``clean_stale_shared_memory``) unlinks what other runs are using. Here each start writes down its number and who it
is, and only what a dead start of this member had is removed, and what no start can be using.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, LOCALS, SHM_TO_CLEAN
from streaming.base.shared import SharedMemory
from streaming.base.shared import prefix as numbers
from streaming.base.shared.prefix import _unpack_locals

from ddm_lightning.core.files import atomic_write_json
from ddm_lightning.core.processes import start_time

SHARED_MEMORY = Path("/dev/shm")
_STARTS = "starts"


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def note_start(cache: Path, prefix: int, folders: list[str]) -> None:
    """Write down that this process has the shared memory number ``prefix``, for the shards in ``folders``."""
    pid = os.getpid()
    record = {"pid": pid, "born": start_time(pid), "boot": _boot(), "prefix": prefix, "folders": folders}
    atomic_write_json(_record(cache, prefix), record)


def note_end(cache: Path, prefix: int) -> None:
    """This process will not read with number ``prefix`` again; its memory goes with it, its lock files now."""
    for left in (_record(cache, prefix), *_locks(prefix)):
        left.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: other starts
        (cache / _STARTS).rmdir()


def _record(cache: Path, prefix: int) -> Path:
    return cache / _STARTS / f"{os.getpid()}-{prefix:06}.json"


def _locks(prefix: int) -> list[Path]:
    return [Path(tempfile.gettempdir()) / f"{prefix:06}_{name}" for name in (BARRIER_FILELOCK, CACHE_FILELOCK)]


def remove_leftovers(cache: Path) -> list[Path]:
    """Remove the shared memory and lock files of this member's starts whose process is dead.

    A number that another process has taken since is left to it: then other folders are noted in that memory.

    Returns:
        What was removed.
    """
    removed: list[Path] = []
    for path in sorted((cache / _STARTS).glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            prefix, same_boot = int(record["prefix"]), record["boot"] == _boot()
            alive = same_boot and record["born"] and start_time(int(record["pid"])) == record["born"]
            folders = [str(folder) for folder in record["folders"]]
        except (ValueError, KeyError, TypeError):
            path.unlink()  # cut short by a full disk; whose number it was nobody knows
            continue
        if alive:
            continue
        if same_boot and _folders_of(SHARED_MEMORY / f"{prefix:06}_{LOCALS}") in (None, folders):
            locks = _locks(prefix)
            # While there is a lock file, nobody takes the number.
            memory = list(SHARED_MEMORY.glob(f"{prefix:06}_*")) if locks[0].exists() else []
            for left in (*memory, *locks):
                with contextlib.suppress(FileNotFoundError):
                    left.unlink()
                    removed.append(left)
        path.unlink()
    return removed


def remove_unowned() -> list[Path]:
    """Remove shared memory of Streaming's with numbers that nobody has: there is neither their folders nor a lock file.

    Streaming 0.13.0 takes such a number and then reads an old place to resume at, or dies of an epoch's order that is
    there already. A construction notes its folders first and they are the last to go, so whoever lives has them; call
    this while none can begin (``open_streams`` has the lock). What belongs to another user stays.

    Returns:
        What was removed.
    """
    owned: dict[str, bool] = {}
    removed: list[Path] = []
    for path in sorted(SHARED_MEMORY.glob("[0-9]*_*")):
        number, _, name = path.name.partition("_")
        if not number.isdecimal() or name not in SHM_TO_CLEAN:
            continue
        if number not in owned:
            signs = (SHARED_MEMORY / f"{number}_{LOCALS}", *_locks(int(number)))
            owned[number] = any(sign.exists() for sign in signs)
        if not owned[number]:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                path.unlink()
                removed.append(path)
    return removed


@contextlib.contextmanager
def search_closes_what_it_opens() -> Iterator[None]:
    """Close the memory of other numbers, which Streaming looks into for a free one.

    It leaves that open until the process ends (0.13.0): six files a number that somebody has, or a killed process had.
    """
    searched: list[SharedMemory] = []

    class Searched(SharedMemory):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            searched.append(self)

    numbers.SharedMemory = Searched  # type: ignore[attr-defined]  # a name that its functions look up
    try:
        yield
    finally:
        numbers.SharedMemory = SharedMemory  # type: ignore[attr-defined]  # as it was
        for memory in searched[:-1]:  # the last is that of the number which was taken
            memory.cleanup()
            atexit.unregister(memory.cleanup)


def _folders_of(memory: Path) -> list[str] | None:
    """The folders noted in a number's memory; None when it is gone."""
    try:
        return [str(folder) for folder in _unpack_locals(memory.read_bytes())[0]]
    except FileNotFoundError:
        return None
    except ValueError:
        return []
