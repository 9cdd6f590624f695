"""Finished work: ledgers on this disk, and their twins in the store at the run's URL, which machines share.

A ledger names files with their sizes and hashes, and comes last. Files in the store are named by content, so publishing
twice changes nothing, an interrupted upload goes on with the missing files, and machines need no locks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias, TypeVar, cast

from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, inside, parse_json, sha256_file, sha256_json

GROUP_SIZE = 64
"""Consecutive parts whose samples are shuffled together; the same for any number of machines."""
POLL_SECONDS = 5.0
PATIENCE_SECONDS = 600.0
"""Time for which an unreachable URL is tried again; work of days goes on when the network does."""

OnProgress: TypeAlias = Callable[[int], None]
"""Called with the number of samples done so far."""
Entries: TypeAlias = dict[str, Any]
"""Finished work by name: the key of its inputs, its files with sizes and hashes, and facts."""
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass
class _File:
    bytes: checks.Count
    sha256: checks.Sha256


@dataclass
class _Entry:
    """Keys of each entry; those of facts come besides."""

    key: checks.Text
    files: dict[str, _File]


class Ledger:
    """A JSON file of finished work.

    An unreadable file counts as an empty one, so the work is done again.

    Args:
        file: the JSON file.
        folder: of the finished files; None for that of the JSON file.
    """

    def __init__(self, file: Path, folder: Path | None = None) -> None:
        self.file = file
        self.folder = folder or file.parent
        self.is_stored = False
        """Whether the entries are in the store; their files need not be here then."""
        self.entries: Entries = {}
        with suppress(OSError, ValueError, AttributeError, UserError):
            self.entries = _checked(parse_json(file.read_text(encoding="utf-8")))

    def is_done(self, name: str, key: str | None = None) -> bool:
        """Whether the work is recorded, under ``key`` unless that is None, and its files exist with their sizes."""
        entry = self.entries.get(name)
        if entry is None or key not in (None, entry["key"]):
            return False

        if self.is_stored:
            return True

        files = entry["files"].items()
        return all(_has_size(self.folder / path, file) for path, file in files)

    def forget(self, *names: str) -> None:
        """Remove work whose files are about to be replaced, first its entry: a kill then leaves no false one."""
        gone = {name: self.entries.pop(name) for name in names if name in self.entries}
        if gone:
            self.save()
            for path in _files_of(gone):
                (self.folder / path).unlink(missing_ok=True)

    def add(self, name: str, key: str, paths: Iterable[Path], **facts: Any) -> None:
        """Record finished work; ``save`` makes it last."""
        files = {}
        for path in sorted(paths):
            name_in_folder = path.relative_to(self.folder).as_posix()
            files[name_in_folder] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}

        self.entries[name] = {"key": key, **facts, "files": files}

    def save(self) -> None:
        """Write the JSON file."""
        atomic_write_json(self.file, self.entries)

    def files(self, name: str) -> dict[str, Any]:
        """Return the files of recorded work; empty before it is done."""
        return self.entries.get(name, {}).get("files", {})


def _checked(entries: Any) -> Entries:
    for name, entry in entries.items():
        checks.record(checks.kept(entry, _Entry), _Entry, name, "repeat the work")

    return dict(entries)


def _files_of(entries: Entries) -> dict[str, Any]:
    """Return the size and hash of each file of all entries, by its path."""
    files = dict[str, Any]()
    for entry in entries.values():
        files |= entry["files"]

    return files


def _has_size(path: Path, file: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == file["bytes"]


def hash_of_files(ledgers: Iterable[Ledger], names: Iterable[str]) -> str:
    """Return a hash of the files of some entries of each ledger."""
    names = sorted(names)
    return sha256_json([[*map(ledger.files, names)] for ledger in ledgers])


def _patient(method: _Method) -> _Method:
    """Repeat a method while the URL cannot be reached; errors of the URL become one line for the user."""

    @wraps(method)
    def call(*args: Any) -> Any:
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            with remote.reaching():
                try:
                    return method(*args)
                except ConnectionError:
                    if time.monotonic() >= end:
                        raise

            time.sleep(POLL_SECONDS)

    return cast("_Method", call)


@dataclass(frozen=True)
class Store:
    """``prepared`` at the run's URL. All methods try for ``PATIENCE_SECONDS`` to reach it.

    Raises:
        UserError: by all methods, if the URL cannot be read or written.
    """

    url: str
    versions: Mapping[str, str]
    """Versions of the packages that shape the result; ledgers of others are refused."""

    @_patient
    def names(self, kind: str) -> set[str]:
        """List the ledgers ``kind``/NAME.json that are not empty."""
        names = set()
        for file, size in remote.files(f"{self.url}/{kind}", recursive=False).items():
            if size and file.endswith(".json"):
                names.add(f"{kind}/{file.removesuffix('.json')}")

        return names

    @_patient
    def forget(self, name: str) -> None:
        """Empty a ledger of other inputs."""
        remote.write(f"{self.url}/{name}.json", b"")

    @_patient
    def read(self, name: str) -> Entries:
        """Return the entries of a ledger; none if it does not exist yet, or was emptied.

        Raises:
            UserError: the ledger is damaged, or other versions made it.
        """
        address = f"{self.url}/{name}.json"
        try:
            found = remote.read(address)
            if not found:
                return {}

            content = parse_json(found)
            versions = dict(content["versions"])
            entries = _checked(content["work"])
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
            raise UserError(
                f"{address}: is no ledger of prepare ({error}); remove it, then repeat the command"
            ) from None

        if versions != self.versions:
            package, _ = min(versions.items() ^ self.versions.items())
            theirs = versions.get(package, "none")
            ours = self.versions.get(package, "none")
            raise UserError(
                f"{address}: was made with {package} {theirs}, and this machine has {ours}; install the same versions "
                "on all machines, or set another remote"
            )

        return entries

    @_patient
    def publish(self, name: str, folder: Path, entries: Entries) -> None:
        """Send the files of some work that are not there, and last its ledger.

        Args:
            name: of the ledger.
            folder: of the files.
            entries: finished work by name.
        """
        files = _files_of(entries)
        addresses = {self._address(name, path, file): path for path, file in files.items()}
        places = {address.rpartition("/")[0] for address in addresses}
        present = {}
        for place, found in zip(places, remote.in_threads(remote.files, places), strict=True):
            for file, size in found.items():
                present[f"{place}/{file}"] = size

        absent = []
        for address, path in addresses.items():
            if present.get(address) != files[path]["bytes"]:
                absent.append((folder / path, address))

        remote.in_threads(lambda pair: remote.put(*pair), absent)
        content = {"versions": dict(self.versions), "work": entries}
        remote.write(f"{self.url}/{name}.json", json.dumps(content).encode())

    def pull(self, name: str, folder: Path, entries: Entries, endings: tuple[str, ...] = ()) -> None:
        """Bring files of recorded work that are not in ``folder``: all, or those with one of ``endings``.

        Raises:
            UserError: a file is missing or differs from its entry.
        """
        for path, file in _files_of(entries).items():
            target = inside(folder, path, Path(f"{name}.json"))
            if (endings and not path.endswith(endings)) or _is_there(target, file):
                continue

            address = self._address(name, path, file)
            self._get(address, target)
            if not _is_there(target, file):
                target.unlink(missing_ok=True)
                raise UserError(
                    f"{address}: is missing, or differs from its entry in size or content; remove "
                    f"{name}.json there, then repeat prepare on the machine that made it"
                )

    @_patient
    def _get(self, address: str, target: Path) -> None:
        with suppress(FileNotFoundError):
            remote.get(address, target)

    def _address(self, name: str, path: str, file: Mapping[str, Any]) -> str:
        if path.startswith("shards/"):  # read by their names, in folders that are named by content
            return f"{self.url}/{path}"

        inner = PurePosixPath(path)
        return f"{self.url}/{name}/{inner.stem}-{file['sha256'][:16]}{inner.suffix}"


def _is_there(path: Path, file: Mapping[str, Any]) -> bool:
    return _has_size(path, file) and sha256_file(path) == file["sha256"]


@dataclass(frozen=True)
class Job:
    """Work on a part, or on a group of parts, that has a ledger of its own."""

    number: int
    """Of the part or group."""
    name: str
    """Of the ledger at the URL."""
    ledger: Ledger
    keys: Mapping[str, str]
    """Key of each entry: a hash of everything it is made from."""
    store: Store | None
    """Where to publish the work, if several machines share it."""

    @property
    def num_samples(self) -> int:
        """Samples of the finished work."""
        raise NotImplementedError

    def is_done(self) -> bool:
        """Whether all is done, and published."""
        is_here = all(self.ledger.is_done(*entry) for entry in self.keys.items())
        return is_here and self.ledger.is_stored == bool(self.store)

    def publish(self) -> None:
        """Publish the work, if several machines share it."""
        if self.store is not None:
            self.store.publish(self.name, self.ledger.folder, self.ledger.entries)

    def pull(self, *endings: str) -> None:
        """Bring the files with these endings, if several machines share them."""
        if self.store is not None:
            self.store.pull(self.name, self.ledger.folder, self.ledger.entries, endings)


def publish_shards(prepared: Path, store: Store, indices: Iterable[str], tick: Callable[[int, int], None]) -> None:
    """Send the shards of all groups on this machine, then the merged index of each folder.

    Args:
        prepared: the folder.
        store: its twin at the run's URL.
        indices: folders below ``shards`` with a merged index.
        tick: called with groups done and groups in total.

    Raises:
        UserError: the URL cannot be written.
    """
    groups = sorted((prepared / "groups").glob("*.json"))
    for number, path in enumerate(groups, 1):
        store.publish(f"groups/{path.stem}", prepared, Ledger(path, prepared).entries)
        tick(number, len(groups))

    with remote.reaching():
        for name in indices:
            remote.put(prepared / "shards" / name / "index.json", f"{store.url}/shards/{name}/index.json")
