"""The MDS shards: one folder a cluster, training and held-out samples apart, the same bytes for the same input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int, UInt64

from ddm_lightning.config import ShardsConfig
from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.partition.rows import Rows
from ddm_lightning.shards.manifest import HELD_OUT, OUT_OF_CLUSTER, TRAIN, shard_name

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
    split_hash: UInt64[np.ndarray, "n"], clusters: Int[np.ndarray, "n"], num_clusters: int, fraction: float
) -> Bool[np.ndarray, "n"]:
    """Which samples no member trains on: those whose hash is below ``fraction`` of its range.

    The hash is of the sample's key, or of its group, and of nothing else, so that samples stay on their side when
    the data set grows or the clusters change, and a group stays together. Every cluster has samples to train on, and,
    with a fraction above 0, one of at least two groups has held-out ones too, unless another cluster trains on these.
    """
    held_out = split_hash < np.uint64(int(fraction * 2.0**64))
    members = [np.flatnonzero(clusters == cluster) for cluster in range(num_clusters)]
    members = [rows for rows in members if len(rows)]
    for rows in members:
        ranks = split_hash[rows]
        if fraction > 0 and ranks.min() != ranks.max() and not held_out[rows].any():
            held_out[split_hash == ranks.min()] = True
    # After that, because a group of several clusters may have been all that one of them trains on.
    for rows in members:
        if held_out[rows].all():
            held_out[split_hash == split_hash[rows].max()] = False
    return held_out


@dataclass(frozen=True)
class Samples:
    """What the shards store of every sample, row by row."""

    columns: Mapping[str, Rows]
    """Numbers and arrays: ``x_0``, ``label``, those of the caption encoder, ``x_0_flipped`` where it is stored."""
    encodings: Mapping[str, str]
    """The MDS encoding of each."""
    captions: Rows
    clusters: Int[np.ndarray, "n"]


@dataclass(frozen=True)
class Moments:
    """Sums over the samples of ``x_0`` and its square, a channel each."""

    count: int
    """Numbers summed a channel."""
    total: Float64[np.ndarray, "c"]
    squares: Float64[np.ndarray, "c"]

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def statistics(self) -> dict[str, list[float]]:
        """Mean and standard deviation a channel."""
        mean = self.total / self.count
        spread = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0))
        return {"mean": mean.tolist(), "std": spread.tolist()}


def split_orders(
    held_out: Bool[np.ndarray, "n"],
    clusters: Int[np.ndarray, "n"],
    num_clusters: int,
    seed: int,
    out_of_cluster_fraction: float = 0.0,
) -> list[tuple[int, str, Int[np.ndarray, "m"]]]:
    """Cluster, split and samples of each folder, in an order drawn from ``seed``; empty ones are left out.

    Shuffled, so that a reader that takes samples as they come sees no sorted data. ``OUT_OF_CLUSTER`` are training
    samples of other clusters, each at most once, so many that they are ``out_of_cluster_fraction`` of what the
    cluster's expert trains on (MoDE, arXiv 2404.16030), or all there are. They stay in the folders of their own
    clusters, too, so that whoever reads all clusters sees each sample once.
    """
    orders = []
    for cluster in range(num_clusters):
        for split_index, (split, side) in enumerate(((TRAIN, ~held_out), (HELD_OUT, held_out))):
            ids = np.flatnonzero((clusters == cluster) & side)
            if len(ids):
                orders.append((cluster, split, np.random.default_rng([seed, cluster, split_index]).permutation(ids)))
        own = np.count_nonzero((clusters == cluster) & ~held_out)
        num_others = round(own * out_of_cluster_fraction / (1 - out_of_cluster_fraction))
        others = np.flatnonzero((clusters != cluster) & ~held_out)
        drawn = np.random.default_rng([seed, cluster, 2]).permutation(others)[:num_others]
        if len(drawn):
            orders.append((cluster, OUT_OF_CLUSTER, drawn))
    return orders


def write_split(
    folder: Path,
    samples: Samples,
    cluster: int,
    split: str,
    order: Int[np.ndarray, "m"],
    config: ShardsConfig,
    model_x_0: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    tick: Callable[[int], None],
) -> Moments:
    """Write ``folder``/cluster-k/{train,held-out,out-of-cluster}.

    Columns: those of ``samples``, ``sample_id`` (the sample's row), ``cluster`` and ``caption``.

    Args:
        model_x_0: stored rows to the mean and variance of ``x_0`` in the networks' units, float64.
        tick: called with the number of samples just written.

    Returns:
        The sums from which the statistics of ``x_0`` follow.
    """
    ensure_torchvision_importable()
    from streaming import MDSWriter

    encodings = {**samples.encodings, "sample_id": "int64", "cluster": "int32", "caption": "str"}
    moments: Moments | None = None
    with MDSWriter(
        out=str(folder / shard_name(cluster, split)),
        columns=encodings,
        compression=config.compression,
        hashes=_HASHES,
        size_limit=config.max_bytes,
    ) as writer:
        for start in range(0, len(order), _SAMPLES_AT_ONCE):
            chosen = order[start : start + _SAMPLES_AT_ONCE]
            block = {name: rows.take(chosen) for name, rows in samples.columns.items()}
            mean, variance = model_x_0(block["x_0"])
            part = Moments(mean[:, 0].size, mean.sum((0, 2, 3)), (mean**2 + variance).sum((0, 2, 3)))
            moments = part if moments is None else moments + part
            captions = samples.captions.take(chosen)
            for row, sample_id in enumerate(chosen.tolist()):
                sample: dict[str, Any] = {name: values[row] for name, values in block.items()}
                sample |= {"sample_id": sample_id, "caption": captions[row]}
                sample["cluster"] = int(samples.clusters[sample_id])
                writer.write(sample)
            tick(len(chosen))
    assert moments is not None
    return moments
