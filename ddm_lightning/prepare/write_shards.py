"""Write the MDS shards: one folder per cluster and split, the same bytes for the same input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, UInt64

from ddm_lightning.config import ShardsConfig
from ddm_lightning.config.load import prepare_to_json
from ddm_lightning.core.columns import Rows
from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_folder, atomic_write_json
from ddm_lightning.prepare.encode import CAPTIONS, LATENTS, RECORDS
from ddm_lightning.prepare.engine import num_processes_for, run_local
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.reading import Plugins, plugins_of
from ddm_lightning.shards.manifest import HELD_OUT, OUT_OF_CLUSTER, TRAIN, StoredForm, shard_name

_SAMPLES_AT_ONCE = 256
_HASHES = ["sha1", "xxh64"]  # MDSWriter wants them sorted


def check_compression(config: ShardsConfig) -> None:
    """Refuse a compression that Streaming does not know or that is not reproducible.

    Raises:
        UserError: naming the key.
    """
    if config.compression is None:
        return
    ensure_torchvision_importable()
    from streaming.base.compression import is_compression

    key = f"key 'prepare.shards.compression' = {config.compression!r}"
    if not is_compression(config.compression):
        raise UserError(f"{key}: Streaming knows no such compression; use zstd:3, or null for none")
    if config.compression.startswith("gz"):
        raise UserError(f"{key}: writes the time into the shards, so runs differ; use zstd:3")


def held_out_samples(
    split_hash: UInt64[np.ndarray, "n"], clusters: Int[np.ndarray, "n"], num_clusters: int, fraction: float
) -> Bool[np.ndarray, "n"]:
    """Choose the held-out samples: those whose hash is below ``fraction`` of its range.

    The hash is of the sample's group or key alone. So samples keep their split when the data set grows or the clusters
    change, and a group stays together. Every cluster keeps samples to train on. With a fraction above 0, every cluster
    of at least two groups also has held-out samples, unless another cluster needs them for training.
    """
    held_out = split_hash < np.uint64(int(fraction * 2.0**64))
    members = [np.flatnonzero(clusters == cluster) for cluster in range(num_clusters)]
    members = [rows for rows in members if len(rows)]
    for rows in members:
        ranks = split_hash[rows]
        if fraction > 0 and ranks.min() != ranks.max() and not held_out[rows].any():
            held_out[split_hash == ranks.min()] = True
    # Afterwards: a group just held out may be all that another cluster trains on.
    for rows in members:
        if held_out[rows].all():
            held_out[split_hash == split_hash[rows].max()] = False
    return held_out


@dataclass(frozen=True)
class Samples:
    """Rows to store in the shards."""

    columns: Mapping[str, Rows]
    """Numbers and arrays: ``x_0``, ``label``, the caption encoder's columns, and ``x_0_flipped`` if stored."""
    encodings: Mapping[str, str]
    """MDS encoding of each column."""
    captions: Rows
    clusters: Int[np.ndarray, "n"]


@dataclass(frozen=True)
class Moments:
    """Sums of ``x_0`` and its square, per channel."""

    count: int
    """Values per channel."""
    total: Float64[np.ndarray, "c"]
    squares: Float64[np.ndarray, "c"]

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    def statistics(self) -> dict[str, list[float]]:
        """Return mean and std per channel."""
        mean = self.total / self.count
        std = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0))
        return {"mean": mean.tolist(), "std": std.tolist()}


def split_orders(
    held_out: Bool[np.ndarray, "n"],
    clusters: Int[np.ndarray, "n"],
    num_clusters: int,
    seed: int,
    out_of_cluster_fraction: float = 0.0,
) -> list[tuple[int, str, Int[np.ndarray, "m"]]]:
    """Return cluster, split and shuffled samples of each non-empty folder.

    Shuffled, so that sequential readers see no sorted data. ``OUT_OF_CLUSTER`` are training samples of other clusters,
    each at most once: ``out_of_cluster_fraction`` of the samples that the cluster's expert trains on (MoDE, arXiv
    2404.16030), or all there are. They are copies; the folders of their own clusters hold them, too.
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
        chosen = np.random.default_rng([seed, cluster, 2]).permutation(others)[:num_others]
        if len(chosen):
            orders.append((cluster, OUT_OF_CLUSTER, chosen))
    return orders


def write_split(
    folder: Path,
    samples: Samples,
    cluster: int,
    split: str,
    order: Int[np.ndarray, "m"],
    config: ShardsConfig,
    form: StoredForm,
    tick: Callable[[int], None],
) -> Moments:
    """Write ``folder``/cluster-k/{train,held-out,out-of-cluster}.

    Columns: those of ``samples``, ``sample_id`` (the sample's row), ``cluster`` and ``caption``.

    Args:
        folder: parent of the cluster folders.
        samples: rows of all samples.
        cluster: number of the cluster.
        split: ``TRAIN``, ``HELD_OUT`` or ``OUT_OF_CLUSTER``.
        order: samples to write.
        config: shard size and compression.
        form: of the stored ``x_0``, for the statistics.
        tick: called with the number of samples just written.

    Returns:
        Sums for the statistics of ``x_0``.
    """
    ensure_torchvision_importable()
    from streaming import MDSWriter

    moments: Moments | None = None
    with MDSWriter(
        out=str(folder / shard_name(cluster, split)),
        columns={**samples.encodings, "sample_id": "int64", "cluster": "int32", "caption": "str"},
        compression=config.compression,
        hashes=_HASHES,
        size_limit=config.max_bytes,
    ) as writer:
        for start in range(0, len(order), _SAMPLES_AT_ONCE):
            chosen = order[start : start + _SAMPLES_AT_ONCE]
            block = {name: rows.take(chosen) for name, rows in samples.columns.items()}
            stored = torch.from_numpy(block["x_0"])
            mean, std = form.mean(stored, torch.float64).numpy(), form.spread(stored, torch.float64)
            variance = 0.0 if std is None else std.square().numpy()
            part = Moments(mean[:, 0].size, mean.sum((0, 2, 3)), (mean**2 + variance).sum((0, 2, 3)))
            moments = part if moments is None else moments + part
            block |= {
                "sample_id": chosen,
                "cluster": samples.clusters[chosen],
                "caption": samples.captions.take(chosen),
            }
            for row in range(len(chosen)):
                writer.write({name: values[row] for name, values in block.items()})
            tick(len(chosen))
    assert moments is not None
    return moments


@dataclass(frozen=True)
class _SplitJob:
    """One folder of shards."""

    prepared: Path
    folder: Path
    cluster: int
    split: str
    order: np.ndarray
    config: str


def write_shards(plugins: Plugins, seed: int, prepared: Prepared, tick: Callable[[int, int], None]) -> None:
    """Write ``shards/cluster-k/{train,held-out,out-of-cluster}`` and ``statistics.json`` atomically.

    Args:
        plugins: encoders and configuration.
        seed: of the samples' order.
        prepared: folder with encoded parts and their clusters.
        tick: called with samples done and samples in total.
    """
    config = plugins.config
    num_clusters = config.partition.num_clusters
    split_hash, clusters = prepared.rows(RECORDS, "split_hash")[:], prepared.clusters
    held_out = held_out_samples(split_hash, clusters, num_clusters, config.held_out_fraction)
    orders = split_orders(held_out, clusters, num_clusters, seed, config.partition.out_of_cluster_fraction)
    num_written = sum(len(order) for _, _, order in orders)
    moments: dict[int, Moments] = {}
    done = 0

    def advance(num: int) -> None:
        nonlocal done
        done += num
        tick(done, num_written)

    with atomic_folder(prepared.shards) as folder:
        text = prepare_to_json(config)
        jobs = [_SplitJob(prepared.folder, folder, cluster, split, order, text) for cluster, split, order in orders]
        num_processes = num_processes_for(config.num_processes, len(jobs), num_written)
        if num_processes > 1:
            for number, sums in run_local(_write_split_in_process, jobs, num_processes):
                moments[number] = sums
                advance(len(jobs[number].order))
        else:
            samples = samples_of(prepared, plugins)
            for number, job in enumerate(jobs):
                moments[number] = _write_split(job, samples, plugins, advance)
        # Each sample once, with its own cluster.
        first, *others = (moments[number] for number, job in enumerate(jobs) if job.split != OUT_OF_CLUSTER)
        statistics = sum(others, first).statistics()
    atomic_write_json(prepared.statistics_file, statistics)


def _write_split_in_process(job: _SplitJob) -> Moments:
    plugins = plugins_of(job.config)
    return _write_split(job, samples_of(Prepared(job.prepared), plugins), plugins, lambda _: None)


def _write_split(job: _SplitJob, samples: Samples, plugins: Plugins, tick: Callable[[int], None]) -> Moments:
    form = StoredForm(plugins.image_encoder.stores, plugins.image_encoder.normalisation)
    return write_split(job.folder, samples, job.cluster, job.split, job.order, plugins.config.shards, form, tick)


def samples_of(prepared: Prepared, plugins: Plugins) -> Samples:
    """Return the rows to store in the shards and their encodings."""
    encoder, captions = plugins.image_encoder, plugins.caption_encoder
    latents = ["x_0", *(["x_0_flipped"] if plugins.config.horizontal_flips else [])]
    columns = {name: prepared.rows(LATENTS, name) for name in latents}
    encodings = {
        name: f"ndarray:{encoder.dtype}:{','.join(map(str, rows.row_shape))}" for name, rows in columns.items()
    }
    columns["label"], encodings["label"] = prepared.rows(RECORDS, "label"), "int32"
    for name, encoding in (captions.columns if captions else {}).items():
        columns[name], encodings[name] = prepared.rows(CAPTIONS, name), encoding
    return Samples(columns, encodings, prepared.texts("captions"), prepared.clusters)
