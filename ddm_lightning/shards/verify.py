"""The index of a folder of shards, and checks of shards against it and the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import hash_file, inside, read_json, sha256_file

_REMEDY = "delete the run's prepared/shards and run prepare again, or copy them again from where that was done"

# Offsets in a shard have 32 bits.
_Number: TypeAlias = Annotated[int, checks.within(0, (1 << 32) - 1)]


@dataclass
class File:
    """A file of a shard in the index."""

    basename: checks.Text
    bytes: _Number
    hashes: dict[str, Any]


@dataclass
class Entry:
    """Keys of a shard in the index that are read here; there are others."""

    format: Annotated[str, checks.one_of(("mds",))]
    version: Annotated[int, checks.within(2, 2)]
    column_names: list[checks.Text]
    column_encodings: list[checks.Text]
    samples: _Number
    raw_data: File
    zip_data: File | None
    compression: str | None = None


@dataclass(frozen=True)
class Shard:
    """One shard of a folder."""

    entry: Entry
    path: Path
    """Its file, uncompressed."""
    packed: Path | None
    """The compressed file, if there is one."""


def read_index(folder: Path) -> list[Shard]:
    """Read the ``index.json`` of an MDS folder.

    Raises:
        UserError: the index is missing or damaged, or names a file outside the folder.
    """
    path = folder / "index.json"
    content = read_json(path, "the index of the shards", _REMEDY)
    source = f"{path}: is not an index of MDS shards"
    if not isinstance(content, dict) or not isinstance(content.get("shards"), list):
        raise UserError(f"{source}; {_REMEDY}")

    shards = []
    for number, found in enumerate(content["shards"]):
        entry = checks.record(checks.kept(found, Entry), Entry, f"{source}: shard {number}", _REMEDY)
        packed = None
        if entry.zip_data:
            packed = inside(folder, entry.zip_data.basename, path)

        shards.append(Shard(entry, inside(folder, entry.raw_data.basename, path), packed))

    return shards


def verify_shards(folder: Path, hashes: bool = True, *, index_sha256: str | None = None) -> int:
    """Check every shard of an MDS folder against its ``index.json``.

    Args:
        folder: the MDS folder.
        hashes: whether to compare SHA-1; otherwise only existence and size.
        index_sha256: the manifest's hash of ``index.json``; None skips its check.

    Returns:
        Number of samples.

    Raises:
        UserError: index or shard is missing or differs; the line names the file and the remedy.
    """
    index = folder / "index.json"
    shards = read_index(folder)
    if index_sha256 is not None and sha256_file(index) != index_sha256:
        raise UserError(f"{index}: differs from the manifest's; {_REMEDY}")

    def verify(shard: Shard) -> int:
        entry = shard.entry
        files = {shard.path: entry.raw_data}
        if shard.packed and entry.zip_data:
            # A compressed shard is present compressed, uncompressed, or both.
            files[shard.packed] = entry.zip_data

        present = [path for path in files if path.is_file()]
        for path in present or [*files][-1:]:
            problem = file_problem(path, files[path], hashes)
            if problem:
                raise UserError(f"{path}: shard {problem}; {_REMEDY}")

        return entry.samples

    return sum(remote.in_threads(verify, shards))


def file_problem(path: Path, entry: File, hashes: bool = True) -> str | None:
    """Compare a file's size, and with ``hashes`` its SHA-1, with its entry in the index; None if they agree."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"is damaged: {size} bytes instead of {entry.bytes}"
    if hashes and hash_file(path, "sha1") != entry.hashes.get("sha1"):
        return "is damaged: its SHA-1 differs from the one in index.json"

    return None


class ShardError(UserError):
    """Unreadable shards."""


def unreadable(cause: str) -> ShardError:
    """Make the error of a run stopped by ``cause``, a line that names the shard."""
    return ShardError(f"a shard cannot be read: {cause}; repair or copy it again, then repeat the command to resume")
