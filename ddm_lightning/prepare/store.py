"""What the machines of a preparation share at its URL: objects, and records that make them count.

A record names objects with their sizes and hashes, and comes last. Objects are named by content, so publishing twice
changes nothing, an interrupted upload goes on with the missing objects, and machines need no locks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import inside, sha256_file

_SHA256 = checks.matching("[0-9a-f]{64}", "a SHA-256")
_FILES = checks.values_of(
    checks.object_of({"bytes": checks.integer(0), "sha256": _SHA256}), "files with sizes and hashes"
)
_WORK = {"key": checks.TEXT, "files": _FILES}

Records: TypeAlias = dict[str, Any]
"""Finished work by name, as in a ``Ledger``."""


@dataclass(frozen=True)
class Store:
    """A preparation at a URL."""

    url: str
    """Address of ``prepared``."""
    versions: Mapping[str, str]
    """Versions of the packages that shape the result; records of others are refused."""

    def names(self, kind: str) -> set[str]:
        """List the records ``kind``/NAME.

        Raises:
            UserError: the URL cannot be read.
        """
        with remote.reaching():
            found = remote.files(f"{self.url}/{kind}", recursive=False)
        return {name.removesuffix(".json") for name in found if name.endswith(".json")}

    def read(self, name: str) -> Records | None:
        """Return the work recorded under a name; None if there is none yet.

        Raises:
            UserError: the URL cannot be read, the record is damaged, or other versions made it.
        """
        address = f"{remote.shown(self.url)}/{name}.json"
        try:
            with remote.reaching():
                try:
                    content = json.loads(remote.read(f"{self.url}/{name}.json"))
                except FileNotFoundError:
                    return None
            versions, work = content["versions"], content["work"]
            for record in work.values():
                if problem := checks.problem_with({key: record[key] for key in _WORK}, _WORK):
                    raise ValueError(problem)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{address}: is no record of prepare ({error}); remove it, then repeat the command"
            ) from None
        if versions != self.versions:
            package = min(name for name, _ in versions.items() ^ self.versions.items())
            theirs, ours = (found.get(package, "none") for found in (versions, self.versions))
            raise UserError(
                f"{address}: was made with {package} {theirs}, and this machine has {ours}; install the same versions "
                "on all machines, or set another remote"
            )
        return dict(work)

    def publish(
        self, name: str, folder: Path, work: Records, on_bytes: Callable[[int], object] = lambda _: None
    ) -> None:
        """Send the files of some work that are not there, and last its record.

        Args:
            name: of the record.
            folder: of the files.
            work: finished work by name.
            on_bytes: called with the size of each file that has arrived.

        Raises:
            UserError: the URL cannot be written.
        """
        files = _files_of(work)
        objects = {self._object(name, path, entry): path for path, entry in files.items()}

        def put(address: str) -> None:
            size = files[objects[address]]["bytes"]
            if present.get(address) != size:
                remote.put(folder / objects[address], address)
            on_bytes(size)

        with remote.reaching():
            places = sorted({address.rpartition("/")[0] for address in objects})
            listed = zip(places, remote.in_threads(remote.files, places), strict=True)
            present = {f"{place}/{file}": size for place, found in listed for file, size in found.items()}
            remote.in_threads(put, objects)
            content = {"versions": dict(self.versions), "work": work}
            remote.write(f"{self.url}/{name}.json", json.dumps(content).encode())

    def pull(
        self, name: str, folder: Path, work: Records, wanted: Callable[[str], bool] = lambda _: True
    ) -> list[Path]:
        """Bring files of recorded work that are not in ``folder``; return those that came.

        Raises:
            UserError: the URL cannot be read, or a file is missing or differs from its record.
        """
        found = []
        with remote.reaching():
            for path, entry in _files_of(work).items():
                target, address = inside(folder, path, Path(f"{name}.json")), self._object(name, path, entry)
                if not wanted(path) or _is_there(target, entry):
                    continue
                with suppress(FileNotFoundError):
                    remote.get(address, target)
                found.append(target)
                if not _is_there(target, entry):
                    target.unlink(missing_ok=True)
                    raise UserError(
                        f"{remote.shown(address)}: is missing, or differs from its record in size or content; remove "
                        f"{name}.json there, then repeat prepare on the machine that made it"
                    )
        return found

    def _object(self, name: str, path: str, entry: Mapping[str, Any]) -> str:
        if path.startswith("shards/"):  # read by their names, in folders that are named by content
            return f"{self.url}/{path}"
        file = PurePosixPath(path)
        return f"{self.url}/{name}/{file.stem}-{entry['sha256'][:16]}{file.suffix}"


def _is_there(path: Path, entry: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == entry["bytes"] and sha256_file(path) == entry["sha256"]


def _files_of(work: Records) -> dict[str, Any]:
    return {path: entry for record in work.values() for path, entry in record["files"].items()}


def publish_shards(prepared: Path, store: Store, indices: Iterable[str], tick: Callable[[int, int], None]) -> None:
    """Send the shards of all groups on this machine, then the merged index of each folder.

    Args:
        prepared: the folder.
        store: at the run's URL.
        indices: folders below ``shards`` with a merged index.
        tick: called with bytes done and bytes in total.

    Raises:
        UserError: the URL cannot be written.
    """
    groups = {
        f"groups/{path.stem}": json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((prepared / "groups").glob("*.json"))
    }
    done, total = 0, sum(entry["bytes"] for work in groups.values() for entry in _files_of(work).values())

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        tick(done, total)

    for name, work in groups.items():
        store.publish(name, prepared, work, advance)
    with remote.reaching():
        for name in indices:
            remote.put(prepared / "shards" / name / "index.json", f"{store.url}/shards/{name}/index.json")
