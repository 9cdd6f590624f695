"""Checks of shards against their index and the manifest."""

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
class _File:
    basename: checks.Text
    bytes: _Number
    hashes: dict[str, Any]


@dataclass
class _Shard:
    """Keys of a shard's entry that are read here or by Streaming; there are others."""

    column_names: list[checks.Text]
    column_encodings: list[checks.Text]
    column_sizes: list[_Number | None]
    samples: _Number
    raw_data: _File
    zip_data: _File | None


def read_index(folder: Path) -> list[dict[str, Any]]:
    """Read the entries of an MDS folder's ``index.json``, one per shard, with consistent sizes.

    Raises:
        UserError: the index is missing or damaged.
    """
    path = folder / "index.json"
    content = read_json(path, "the index of the shards", _REMEDY)
    if not isinstance(content, dict) or not isinstance(content.get("shards"), list):
        raise UserError(f"{path}: is not an index of MDS shards; {_REMEDY}")

    shards: list[dict[str, Any]] = content["shards"]
    for number, shard in enumerate(shards):
        source = f"{path}: is not an index of MDS shards: shard {number}"
        checks.record(checks.kept(shard, _Shard), _Shard, source, _REMEDY)

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

    def verify(shard: dict[str, Any]) -> int:
        entries = [shard["raw_data"]]
        if shard["zip_data"] is not None:
            # A compressed shard is present compressed, uncompressed, or both.
            entries.append(shard["zip_data"])

        files = {inside(folder, entry["basename"], index): entry for entry in entries}
        present = [path for path in files if path.is_file()]
        for path in present or [*files][-1:]:
            problem = file_problem(path, files[path], hashes)
            if problem:
                raise UserError(f"{path}: shard {problem}; {_REMEDY}")

        return int(shard["samples"])

    return sum(remote.in_threads(verify, shards))


def file_problem(path: Path, entry: dict[str, Any], hashes: bool = True) -> str | None:
    """Compare a file's size, and with ``hashes`` its SHA-1, with its entry in the index; None if they agree."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"is damaged: {size} bytes instead of {entry['bytes']}"
    if hashes and hash_file(path, "sha1") != entry["hashes"].get("sha1"):
        return "is damaged: its SHA-1 differs from the one in index.json"

    return None


class ShardError(UserError):
    """Unreadable shards."""


def unreadable(cause: str) -> ShardError:
    """Make the error of a run stopped by ``cause``, a line that names the shard."""
    return ShardError(f"a shard cannot be read: {cause}; repair or copy it again, then repeat the command to resume")
