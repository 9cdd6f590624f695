"""Are the shards the ones that were written? Streaming itself hangs or ends early on a damaged shard."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddm_lightning.errors import UserError
from ddm_lightning.files import inside, read_json, sha256_file

_REMEDY = "delete the run's prepared/shards and run prepare again, or copy them again from where that was done"


def verify_shards(folder: Path, hashes: bool = True, *, index_sha256: str | None = None) -> int:
    """Check every shard of an MDS folder against its ``index.json``.

    Args:
        folder: the MDS folder.
        hashes: whether to read the shards and compare SHA-1; else only that they exist with the right size.
        index_sha256: what the manifest says about ``index.json`` itself; None leaves it unchecked.

    Returns:
        Samples in the folder.

    Raises:
        UserError: index or shard is missing or differs; the line names the file and the remedy.
    """
    index = folder / "index.json"
    content = read_json(index, "the index of the shards", _REMEDY)
    if index_sha256 is not None and sha256_file(index) != index_sha256:
        raise UserError(f"{index}: differs from what the manifest says; {_REMEDY}")
    try:
        shards = [(int(shard["samples"]), _files(shard)) for shard in content["shards"]]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{index}: is no index of MDS shards; {_REMEDY}") from None
    for _, files in shards:
        # A compressed shard lies there compressed, unpacked, or both.
        present = [entry for entry in files if inside(folder, entry["basename"], index).is_file()]
        if not present:
            raise UserError(f"{folder / files[-1]['basename']}: shard is missing; {_REMEDY}")
        for entry in present:
            _check_file(folder / entry["basename"], entry, hashes)
    return sum(samples for samples, _ in shards)


def remove_damaged(folder: Path, *, index_sha256: str | None = None) -> list[Path]:
    """Remove from a folder of fetched shards what differs from its ``index.json``, so that it is fetched again.

    Args:
        folder: where shards are fetched to, perhaps not all of them yet.
        index_sha256: what the manifest says about ``index.json``; where it is another, everything goes.

    Returns:
        What was removed.
    """
    index = folder / "index.json"
    try:
        if index_sha256 is not None and sha256_file(index) != index_sha256:
            raise ValueError
        files = [entry for shard in json.loads(index.read_text(encoding="utf-8"))["shards"] for entry in _files(shard)]
    except (KeyError, TypeError, ValueError):
        shutil.rmtree(folder)
        return [folder]
    removed = []
    for entry in files:
        path = inside(folder, entry["basename"], index)
        try:
            if path.is_file():
                _check_file(path, entry, hashes=True)
        except UserError:
            path.unlink()
            removed.append(path)
    return removed


def _files(shard: dict[str, Any]) -> list[dict[str, Any]]:
    """The files in which a shard may lie: raw and, when it is compressed, packed."""
    files = [entry for entry in (shard["raw_data"], shard["zip_data"]) if entry is not None]
    return [
        {"basename": str(entry["basename"]), "bytes": int(entry["bytes"]), "sha1": str(entry["hashes"]["sha1"])}
        for entry in files
    ]


def _check_file(path: Path, entry: dict[str, Any], hashes: bool) -> None:
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise UserError(f"{path}: shard is damaged: {size} bytes instead of {entry['bytes']}; {_REMEDY}")
    if hashes:
        digest = hashlib.sha1(usedforsecurity=False)
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != entry["sha1"]:
            raise UserError(f"{path}: shard is damaged: its SHA-1 differs from the one in index.json; {_REMEDY}")


def num_samples_of(folders: Iterable[Path]) -> int:
    """Samples of some MDS folders, by their indices."""
    indices = (json.loads((folder / "index.json").read_text(encoding="utf-8")) for folder in folders)
    return sum(int(shard["samples"]) for index in indices for shard in index["shards"])
