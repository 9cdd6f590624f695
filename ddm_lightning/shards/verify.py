"""Checks of shards against their index and the manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import hash_file, inside, read_json, sha256_file

_REMEDY = "delete the run's prepared/shards and run prepare again, or copy them again from where that was done"

# Offsets in a shard have 32 bits.
_BYTES: checks.Check = (lambda value: checks.is_int(value, 0) and value < 1 << 32, "a number below 2^32")
_FILE = checks.object_of({"basename": checks.TEXT, "bytes": _BYTES, "hashes": checks.OBJECT})
_SHARD_CHECKS: dict[str, checks.Check] = {
    "column_names": checks.list_of(checks.TEXT),
    "column_encodings": checks.list_of(checks.TEXT),
    "column_sizes": checks.list_of(checks.optional(_BYTES)),
    "samples": _BYTES,
    "raw_data": _FILE,
    "zip_data": checks.optional(_FILE),
}


def read_index(folder: Path) -> list[dict[str, Any]]:
    """Read the entries of an MDS folder's ``index.json``, one per shard, with consistent sizes.

    Raises:
        UserError: the index is missing or damaged.
    """
    path = folder / "index.json"
    content = read_json(path, "the index of the shards", _REMEDY)
    shards = content.get("shards") if isinstance(content, dict) else None
    if not isinstance(shards, list):
        raise UserError(f"{path}: is not an index of MDS shards; {_REMEDY}")
    for number, shard in enumerate(shards):
        known = {key: shard[key] for key in _SHARD_CHECKS if key in shard} if isinstance(shard, dict) else shard
        problem = checks.problem_with(known, _SHARD_CHECKS)
        if problem is not None:
            raise UserError(f"{path}: is not an index of MDS shards: shard {number}: {problem}; {_REMEDY}")
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
    index, shards = folder / "index.json", read_index(folder)
    if index_sha256 is not None and sha256_file(index) != index_sha256:
        raise UserError(f"{index}: differs from the manifest's; {_REMEDY}")

    def verify(shard: dict[str, Any]) -> int:
        entries = [entry for entry in (shard["raw_data"], shard["zip_data"]) if entry is not None]
        files = {inside(folder, entry["basename"], index): entry for entry in entries}
        # A compressed shard is present compressed, uncompressed, or both.
        for path in [path for path in files if path.is_file()] or list(files)[-1:]:
            if problem := file_problem(path, files[path], hashes):
                raise UserError(f"{path}: shard {problem}; {_REMEDY}")
        return int(shard["samples"])

    return sum(remote.in_threads(verify, shards))


def file_problem(path: Path, entry: dict[str, Any], hashes: bool = True) -> str | None:
    """Compare a file's size, and with ``hashes`` its SHA-1, with its entry in the index; None if they agree."""
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != entry["bytes"]:
        return f"is damaged: {size} bytes instead of {entry['bytes']}"
    if hashes and hash_file(path, "sha1") != entry["hashes"].get("sha1"):
        return "is damaged: its SHA-1 differs from the one in index.json"
    return None


class ShardError(UserError):
    """Unreadable shards."""


def unreadable(cause: str) -> ShardError:
    """Make the error of a run stopped by ``cause``, a line that names the shard."""
    return ShardError(f"a shard cannot be read: {cause}; repair or copy it again, then repeat the command to resume")
