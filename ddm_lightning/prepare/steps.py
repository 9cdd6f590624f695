"""What each stage of ``prepare`` does with the files of the stages before it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ddm_lightning.config.load import prepare_to_json
from ddm_lightning.core.columns import save_array
from ddm_lightning.core.files import atomic_folder, atomic_write, atomic_write_json, sha256_json
from ddm_lightning.partition.build import displaced_fractions, fit_partition
from ddm_lightning.prepare.encode import (
    CAPTIONS,
    FEATURES,
    LATENTS,
    RECORDS,
    PartJob,
    encode_part,
    encode_part_in_process,
    read_state,
)
from ddm_lightning.prepare.engine import num_processes_for, run_local, run_ray
from ddm_lightning.prepare.index import check_broken
from ddm_lightning.prepare.plugins import Plugins, plugins_of
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.records import Part
from ddm_lightning.prepare.write_shards import Moments, Samples, held_out_samples, split_orders, write_split
from ddm_lightning.shards.manifest import OUT_OF_CLUSTER, StoredForm

Tick = Callable[[int, int], None]
"""Called with samples done and samples in all."""

_MAX_THUMBNAILS, _MIN_THUMBNAILS_A_PART = 8192, 16


def encode(
    plugins: Plugins,
    prepared: Prepared,
    parts: Sequence[Part],
    wanted: Mapping[int, Mapping[str, str]],
    tick: Tick,
    captions_used: bool,
) -> None:
    """Compute the ``wanted`` groups of columns of each part (``encode.py``), by the configured engine.

    Raises:
        UserError: as ``encode_part``, or as soon as more samples are broken than may be.
    """
    config = plugins.config
    max_thumbnails = max(_MIN_THUMBNAILS_A_PART, _MAX_THUMBNAILS // len(parts))
    text = prepare_to_json(config)
    jobs = [
        PartJob(parts[number], prepared.folder_of(parts[number]), keys, max_thumbnails, text)
        for number, keys in wanted.items()
    ]
    sizes = [job.part.num_samples for job in jobs]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    done = 0
    counts: Counter[str] = Counter()

    def advance(in_part: int) -> None:
        tick(done + in_part, max(total or 0, done + in_part))

    for job in _work_on_parts(jobs, plugins, total, advance):
        state = read_state(job.folder)[RECORDS]
        done += state["num_read"]
        counts.update(state["broken"])
        counts.update(state.get("unread_captions", {}).values() if captions_used else ())
        advance(0)
        check_broken(counts, done, config.max_bad_fraction, job.folder / RECORDS / "broken.jsonl")


def _work_on_parts(
    jobs: Sequence[PartJob], plugins: Plugins, num_samples: int | None, advance: Callable[[int], None]
) -> Iterator[PartJob]:
    """Each job when it is done."""
    config = plugins.config
    num_processes = num_processes_for(config.num_processes, len(jobs), num_samples)
    if config.engine == "ray":
        for number, _ in run_ray(encode_part_in_process, jobs):
            yield jobs[number]
    elif num_processes > 1:
        for number, _ in run_local(encode_part_in_process, jobs, num_processes):
            yield jobs[number]
    else:
        for job in jobs:
            encode_part(job, plugins, advance)
            yield job


def compute_partition(plugins: Plugins, seed: int, prepared: Prepared, tick: Tick, fine_key: str) -> Callable[[], None]:
    """Compute the partition.

    Returns a function that writes ``partition.safetensors``, ``clusters.npy`` and ``partition.json`` (displaced
    fractions). Fine centroids are kept under ``fine_key``.

    Raises:
        UserError: as ``fit_partition``.
    """
    config = plugins.config
    features = prepared.rows(FEATURES, "features")
    labels, keys = prepared.rows(RECORDS, "label")[:], prepared.texts("keys")
    name, kept = sha256_json(asdict(config.features)), (prepared.fine_file, fine_key)
    partition, clusters = fit_partition(
        features, config.partition, seed, labels=labels, keys=keys, features=name, tick=tick, kept_fine=kept
    )
    displaced = displaced_fractions(partition, features, clusters, config.partition.device)
    tick(len(features), len(features))

    def write() -> None:
        partition.save(prepared.partition_file)
        atomic_write(prepared.clusters_file, lambda path: save_array(path, clusters))
        atomic_write_json(prepared.partition_facts_file, {"displaced": displaced})

    return write


@dataclass(frozen=True)
class _SplitJob:
    """One folder of shards to write."""

    prepared: Path
    folder: Path
    cluster: int
    split: str
    order: np.ndarray
    config: str


def write_shards(plugins: Plugins, seed: int, prepared: Prepared, tick: Tick) -> None:
    """``shards/cluster-k/{train,held-out,out-of-cluster}`` and ``statistics.json``, whole or not at all."""
    config = plugins.config
    num_clusters = config.partition.num_clusters
    split_hash = prepared.rows(RECORDS, "split_hash")
    clusters = prepared.clusters
    held_out = held_out_samples(split_hash[:], clusters, num_clusters, config.held_out_fraction)
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
        # Each sample once: those out of cluster are in the sums of their own.
        first, *others = (moments[number] for number, job in enumerate(jobs) if job.split != OUT_OF_CLUSTER)
        statistics = sum(others, first).statistics()
    atomic_write_json(prepared.statistics_file, statistics)


def _write_split_in_process(job: _SplitJob) -> Moments:
    plugins = plugins_of(job.config)
    return _write_split(job, samples_of(Prepared(job.prepared), plugins), plugins, lambda _: None)


def _write_split(job: _SplitJob, samples: Samples, plugins: Plugins, tick: Callable[[int], None]) -> Moments:
    form = StoredForm(plugins.image_encoder.stores, plugins.image_encoder.normalisation)

    def model_x_0(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = torch.from_numpy(stored)
        spread = form.spread(rows, torch.float64)
        return form.mean(rows, torch.float64).numpy(), np.zeros(1) if spread is None else spread.square().numpy()

    config = plugins.config.shards
    return write_split(job.folder, samples, job.cluster, job.split, job.order, config, model_x_0, tick)


def samples_of(prepared: Prepared, plugins: Plugins) -> Samples:
    """What the shards store, and as what."""
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
