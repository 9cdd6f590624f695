"""The parts of MosaicML Streaming in use; no other module imports it.

It writes and decompresses shards, and shuffles as ``StreamingDataset`` does, which can also read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from ddm_lightning.core.compat import import_light
from ddm_lightning.core.files import atomic_write_text

import_light("streaming", "streaming.base", first="streaming.base.format")

from streaming.base.compression import decompress  # noqa: E402  # after that
from streaming.base.format.mds.encodings import mds_decode  # noqa: E402
from streaming.base.format.mds.writer import MDSWriter  # noqa: E402
from streaming.base.shuffle import get_shuffle  # noqa: E402

__all__ = ["decompress", "mds_decode", "merge_index", "open_writer", "shuffled", "window"]
# Least number of samples in a block of the shuffle, which is fetched before the first step of an epoch. It is at least
# four times the largest shard, because a shard larger than a block is not mixed with others.
_MIN_BLOCK = 1 << 18
_HASHES = ["sha1", "xxh64"]  # MDSWriter wants them sorted


def open_writer(folder: Path, columns: Mapping[str, str], compression: str | None, max_bytes: int) -> MDSWriter:
    """Open a writer of shards in ``folder``; ``columns`` gives their encodings."""
    return MDSWriter(
        out=str(folder), columns=dict(columns), compression=compression, hashes=_HASHES, size_limit=max_bytes
    )


def merge_index(folders: Sequence[Path], out: Path) -> None:
    """Write ``out``/index.json, whole or not at all, over the shards of ``folders``, which are in ``out``.

    The bytes are those of Streaming's ``merge_index``, which takes a path with ``#`` or ``?`` for another one.
    """
    shards = []
    for folder in folders:
        for shard in json.loads((folder / "index.json").read_bytes())["shards"]:
            for file in (shard["raw_data"], shard["zip_data"]):
                if file:
                    file["basename"] = f"{folder.name}/{file['basename']}"

            shards.append(shard)

    atomic_write_text(out / "index.json", json.dumps({"version": 2, "shards": shards}))


def shuffled(shard_sizes: Sequence[int], seed: int, epoch: int) -> Int[np.ndarray, "n"]:
    """Return every sample once, by its position in the concatenated shards, in the order ``py1e``."""
    # One canonical node: a permutation of all shards, whatever the number of nodes.
    return get_shuffle("py1e", np.asarray(shard_sizes, np.int64), 1, seed, epoch, _block(shard_sizes))


def window(shard_sizes: Sequence[int]) -> int:
    """Return the most samples over which ``shuffled`` scatters a shard."""
    return 5 * _block(shard_sizes) // 4


def _block(shard_sizes: Sequence[int]) -> int:
    return max(_MIN_BLOCK, 4 * int(max(shard_sizes)))
