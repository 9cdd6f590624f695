"""The MDS shards: one folder a cluster, training and held-out samples apart, the same bytes for the same input."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from ddm_lightning._compat import ensure_torchvision_importable
from ddm_lightning.config import ShardsConfig
from ddm_lightning.errors import UserError
from ddm_lightning.files import atomic_folder
from ddm_lightning.prepare.interfaces import ImageEncoder
from ddm_lightning.prepare.manifest import HELD_OUT, TRAIN, shard_name

_SAMPLES_AT_ONCE = 256
# MDSWriter wants them sorted.
_HASHES = ["sha1", "xxh64"]


def check_compression(config: ShardsConfig) -> None:
    """Refuse a compression that Streaming does not know, or that would not give the same bytes twice.

    Raises:
        UserError: the line names the key.
    """
    if config.compression is None:
        return
    ensure_torchvision_importable()
    from streaming.base.compression import is_compression

    key = f"key 'prepare.shards.compression' = {config.compression!r}"
    if not is_compression(config.compression):
        raise UserError(f"{key}: Streaming knows no such compression; try zstd:3, or null for none")
    if config.compression.startswith("gz"):
        raise UserError(f"{key}: writes the time into the shards, so that no two runs agree; use zstd:3")


def held_out_samples(
    keys: Sequence[str], clusters: Int[np.ndarray, "n"], num_clusters: int, fraction: float
) -> Bool[np.ndarray, "n"]:
    """Which samples no member trains on: those whose key hashes below ``fraction``.

    The hash sees nothing but the key, so that samples stay on their side when the data set grows or the
    clusters change. With a fraction above 0, a cluster of at least two samples has one on either side.
    """
    digests = (hashlib.blake2b(key.encode("utf-8"), digest_size=8).digest() for key in keys)
    rank = np.fromiter((int.from_bytes(digest, "little") for digest in digests), np.uint64, len(keys))
    held_out = rank < np.uint64(int(fraction * 2.0**64))
    for cluster in range(num_clusters):
        members = np.flatnonzero(clusters == cluster)
        if fraction > 0 and len(members) >= 2 and not held_out[members].any():
            held_out[members[rank[members].argmin()]] = True
        if len(members) and held_out[members].all():
            held_out[members[rank[members].argmax()]] = False
    return held_out


def write_shards(
    folder: Path,
    *,
    images: UInt8[np.ndarray, "n h w 3"],
    keys: Sequence[str],
    captions: Sequence[str],
    labels: Sequence[int],
    texts: Float[np.ndarray, "n size"] | None,
    clusters: Int[np.ndarray, "n"],
    num_clusters: int,
    encoder: ImageEncoder,
    held_out_fraction: float,
    config: ShardsConfig,
    seed: int,
    tick: Callable[[int, int], None],
) -> None:
    """Write ``folder``/cluster-k/{train,held-out}, whole or not at all; a split without samples has no folder.

    Columns: ``x_0`` (as the encoder stores it), ``sample_id`` (position in the source), ``cluster``,
    ``label``, ``caption``, and ``text`` (float16) when there are ``texts``. Within a folder the samples lie
    in an order drawn from ``seed``, so that a reader that takes them as they come sees no sorted data.
    """
    ensure_torchvision_importable()
    from streaming import MDSWriter

    shape = ",".join(map(str, encoder.x_shape(images.shape[1])))
    columns = {
        "x_0": f"ndarray:{encoder.dtype}:{shape}",
        "sample_id": "int64",
        "cluster": "int32",
        "label": "int32",
        "caption": "str",
    }
    if texts is not None:
        columns["text"] = f"ndarray:float16:{texts.shape[1]}"
    held_out = held_out_samples(keys, clusters, num_clusters, held_out_fraction)
    done = 0
    with atomic_folder(folder) as temporary:
        for cluster in range(num_clusters):
            for split_index, (split, side) in enumerate(((TRAIN, ~held_out), (HELD_OUT, held_out))):
                ids = np.flatnonzero((clusters == cluster) & side)
                if not len(ids):
                    continue
                order = np.random.default_rng([seed, cluster, split_index]).permutation(ids)
                with MDSWriter(
                    out=str(temporary / shard_name(cluster, split)),
                    columns=columns,
                    compression=config.compression,
                    hashes=_HASHES,
                    size_limit=config.max_bytes,
                ) as writer:
                    for start in range(0, len(order), _SAMPLES_AT_ONCE):
                        chosen = order[start : start + _SAMPLES_AT_ONCE]
                        stored = encoder.encode(images[chosen])
                        for sample_id, x_0 in zip(chosen.tolist(), stored, strict=True):
                            sample = {
                                "x_0": x_0,
                                "sample_id": sample_id,
                                "cluster": cluster,
                                "label": labels[sample_id],
                                "caption": captions[sample_id],
                            }
                            if texts is not None:
                                sample["text"] = texts[sample_id].astype(np.float16)
                            writer.write(sample)
                        done += len(chosen)
                        tick(done, len(keys))
