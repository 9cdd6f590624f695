"""Write the MDS shards, one folder per cluster and split, and describe them: the same bytes for the same input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int, UInt64

from ddm_lightning.config.experiment import Experiment, ShardsConfig
from ddm_lightning.core.files import atomic_folder, atomic_write_json, read_json
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.encoders.interfaces import StoredForm, array_encoding, parse_encoding
from ddm_lightning.partition.columns import Rows
from ddm_lightning.partition.partition import Partition
from ddm_lightning.prepare.encode import CAPTIONS, LATENTS, RECORDS
from ddm_lightning.prepare.engine import run_jobs
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.reading import Plugins
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, ClusterSamples, Manifest, shard_name
from ddm_lightning.shards.mosaic import open_writer
from ddm_lightning.shards.verify import verify_shards

_SAMPLES_AT_ONCE = 256


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
    """``x_0``, ``label``, the caption encoder's columns and those of ``prepare.keep``; ``x_0_flipped`` if stored."""
    encodings: Mapping[str, str]
    """MDS encoding of each column; its rows are cast to it."""
    captions: Rows
    clusters: Int[np.ndarray, "n"]
    form: StoredForm
    """Form in which ``x_0`` is stored."""


def split_orders(
    held_out: Bool[np.ndarray, "n"], clusters: Int[np.ndarray, "n"], num_clusters: int, seed: int
) -> list[tuple[int, str, Int[np.ndarray, "m"]]]:
    """Return cluster, split and samples of each non-empty folder; shuffled, so that sequential readers see no order."""
    orders = []
    for cluster in range(num_clusters):
        for split_index, (split, side) in enumerate(((TRAIN, ~held_out), (HELD_OUT, held_out))):
            ids = np.flatnonzero((clusters == cluster) & side)
            if len(ids):
                orders.append((cluster, split, np.random.default_rng([seed, cluster, split_index]).permutation(ids)))
    return orders


@dataclass(frozen=True)
class SplitJob:
    """One folder of shards, ``folder``/cluster-k/{train,held-out}."""

    prepared: Path
    folder: Path
    cluster: int
    split: str
    """``TRAIN`` or ``HELD_OUT``."""
    order: Int[np.ndarray, "m"]
    """Samples to write."""


def write_split(
    job: SplitJob, samples: Samples, config: ShardsConfig, on_progress: Callable[[int], None]
) -> Float64[np.ndarray, "3 c"]:
    """Write the shards of one split.

    Columns: those of ``samples``, ``sample_id`` (the sample's row), ``cluster`` and ``caption``.

    Args:
        job: the folder and its samples.
        samples: rows of all samples.
        config: shard size and compression.
        on_progress: called with the number of samples written so far.

    Returns:
        Per channel of ``x_0``: number of values, their sum, and the sum of their squares.
    """
    moments: list[Float64[np.ndarray, "3 c"]] = []
    types = {name: parse_encoding(encoding)[0] for name, encoding in samples.encodings.items()}
    folder = job.folder / shard_name(job.cluster, job.split)
    encodings = {**samples.encodings, "sample_id": "int64", "cluster": "int32", "caption": "str"}
    with open_writer(folder, encodings, config.compression, config.max_bytes) as writer:
        for start in range(0, len(job.order), _SAMPLES_AT_ONCE):
            chosen = job.order[start : start + _SAMPLES_AT_ONCE]
            block = {name: rows.take(chosen).astype(types[name], copy=False) for name, rows in samples.columns.items()}
            stored = torch.from_numpy(block["x_0"])
            mean, std = samples.form.mean(stored, torch.float64).numpy(), samples.form.std(stored, torch.float64)
            squares = mean**2 + (0.0 if std is None else std.square().numpy())
            moments.append(np.stack([np.ones_like(mean).sum((0, 2, 3)), mean.sum((0, 2, 3)), squares.sum((0, 2, 3))]))
            block |= {"sample_id": chosen, "cluster": samples.clusters[chosen]}
            block["caption"] = samples.captions.take(chosen)
            for row in range(len(chosen)):
                writer.write({name: values[row] for name, values in block.items()})
            on_progress(start + len(chosen))
    return sum(moments[1:], moments[0])


def statistics_of(moments: Float64[np.ndarray, "3 c"]) -> dict[str, list[float]]:
    """Return mean and std per channel from the sums of ``write_split``."""
    count, total, squares = moments
    mean = total / count
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(squares / count - mean**2, 0)).tolist()}


def write_shards(plugins: Plugins, seed: int, prepared: Prepared, on_progress: Callable[[int, int], None]) -> str:
    """Write ``shards/cluster-k/{train,held-out}`` and ``statistics.json`` atomically.

    Args:
        plugins: encoders and configuration.
        seed: of the samples' order.
        prepared: folder with encoded parts and their clusters.
        on_progress: called with samples done and samples in total.

    Returns:
        The counts in words.
    """
    config, clusters = plugins.config, prepared.clusters
    num_clusters, split_hash = config.partition.num_clusters, prepared.rows(RECORDS, "split_hash")[:]
    held_out = held_out_samples(split_hash, clusters, num_clusters, config.held_out_fraction)
    num_samples, done = len(clusters), 0

    def advance(in_folder: int) -> None:
        on_progress(done + in_folder, num_samples)

    with atomic_folder(prepared.shards) as folder:
        jobs = [
            SplitJob(prepared.folder, folder, *order) for order in split_orders(held_out, clusters, num_clusters, seed)
        ]
        sums = dict[int, Float64[np.ndarray, "3 c"]]()
        for number, moments in run_jobs(_write_job, jobs, plugins, num_samples, advance):
            sums[number] = moments
            done += len(jobs[number].order)
            advance(0)
    # In the order of the jobs, because rounding depends on it.
    atomic_write_json(prepared.statistics_file, statistics_of(np.sum([sums[job] for job in range(len(jobs))], axis=0)))
    size = sum(path.stat().st_size for path in prepared.shards.rglob("*") if path.is_file())
    return f"{num_samples:,} samples, {format_bytes(size)}"


def _write_job(job: SplitJob, plugins: Plugins, on_progress: Callable[[int], None]) -> Float64[np.ndarray, "3 c"]:
    return write_split(job, samples_of(Prepared(job.prepared), plugins), plugins.config.shards, on_progress)


def samples_of(prepared: Prepared, plugins: Plugins) -> Samples:
    """Return the rows to store in the shards and their encodings."""
    encoder, captions = plugins.image_encoder, plugins.caption_encoder
    latents = ["x_0", *(["x_0_flipped"] if plugins.config.horizontal_flips else [])]
    columns = {name: prepared.rows(LATENTS, name) for name in latents}
    encodings = {name: array_encoding(encoder.dtype, rows.row_shape) for name, rows in columns.items()}
    columns["label"], encodings["label"] = prepared.rows(RECORDS, "label"), "int32"
    for name, encoding in (captions.columns if captions else {}).items():
        columns[name], encodings[name] = prepared.rows(CAPTIONS, name), encoding
    for number, name in enumerate(plugins.config.keep):
        columns[name], encodings[name] = prepared.rows(RECORDS, f"kept-{number}"), "float64"
    return Samples(
        columns,
        encodings,
        prepared.texts("captions"),
        prepared.clusters,
        StoredForm(encoder.stores, encoder.normalisation),
    )


def manifest_of(
    experiment: Experiment, plugins: Plugins, prepared: Prepared, files: Callable[[str], Mapping[str, Any]]
) -> Manifest:
    """Describe the shards and how to read them; ``files`` gives a stage's files with their hashes."""
    config = experiment.prepare
    partition = Partition.load(prepared.partition_file)
    indices = {
        name.removeprefix("shards/").removesuffix("/index.json"): entry["sha256"]
        for name, entry in files("shards").items()
        if name.endswith("/index.json")
    }
    samples = {name: verify_shards(prepared.shards / name, hashes=False) for name in indices}
    clusters = tuple(
        ClusterSamples(*(samples.get(shard_name(k, split), 0) for split in (TRAIN, HELD_OUT)))
        for k in range(partition.num_clusters)
    )
    encoder, captions = plugins.image_encoder, plugins.caption_encoder
    size = prepared.index["image_size"]
    num_classes = plugins.source.num_classes
    num_cells = len(clusters) * num_classes
    cells = prepared.clusters.astype(np.int64) * num_classes + prepared.rows(RECORDS, "label")[:]
    return Manifest(
        source=asdict(config.source),
        attribution=plugins.source.attribution,
        images={**asdict(config.images), "size": size},
        image_encoder=asdict(config.image_encoder),
        stores=encoder.stores,
        x_shape=encoder.x_shape(size),
        normalisation=encoder.normalisation,
        statistics=read_json(prepared.statistics_file, "the statistics of x_0", "run prepare again"),
        caption_encoder=asdict(config.caption_encoder) if config.caption_encoder else None,
        text_size=captions.size if captions else 0,
        token_shape=captions.token_shape if captions else None,
        columns=dict(samples_of(prepared, plugins).encodings),
        num_classes=num_classes,
        features=asdict(config.features),
        provenance=plugins.provenance(),
        filtered=prepared.index.get("filtered", {}),
        **{name: prepared.index[name] for name in ("num_read", "broken", "num_samples", "num_without_caption")},
        clusters=clusters,
        priors=tuple(partition.priors.tolist()),
        seed=experiment.seed,
        index_sha256=indices,
        partition_sha256=files("partition")["partition.safetensors"]["sha256"],
        versions=plugins.versions(),
        class_names=list(getattr(plugins.source, "class_names", None) or ()) or None,
        class_counts=np.bincount(cells, minlength=num_cells).reshape(len(clusters), -1).tolist(),
    )
