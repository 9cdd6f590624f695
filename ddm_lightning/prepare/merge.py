"""Merge what the groups of parts have written: counts, one index per folder of shards, and the manifest."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.files import sha256_file
from ddm_lightning.partition.build import check_balance
from ddm_lightning.partition.partition import Partition
from ddm_lightning.prepare.plugins import Plugins, inputs_of_images
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.write_shards import Moments
from ddm_lightning.shards.manifest import FORMAT_VERSION, HELD_OUT, TRAIN, ClusterSamples, Manifest, shard_name
from ddm_lightning.shards.mosaic import merge_index


def merge_groups(
    experiment: Experiment, plugins: Plugins, prepared: Prepared, groups: Sequence[Mapping[str, Any]]
) -> Manifest:
    """Write ``partition.safetensors`` and the index of each folder of shards, and describe the shards.

    Args:
        experiment: the experiment.
        plugins: its source and encoders.
        prepared: the folder; of the shards, only the indices of the groups need to be there.
        groups: ledger entries of all groups with samples, in order.

    Raises:
        UserError: a cluster is empty or too large.
    """
    config = experiment.prepare
    index = prepared.index
    class_counts = np.sum([group["class_counts"] for group in groups], axis=0)
    counts = torch.from_numpy(class_counts.sum(1))
    num_fitted = len(prepared.clusters)
    if num_fitted < int(counts.sum()):
        check_balance(counts, config.partition, num_fitted)

    partition = replace(Partition.load(prepared.rule_file), counts=counts)
    partition.save(prepared.partition_file)
    num_samples, indices = _merge_folders(prepared.shards, groups)

    def count(*names: str | None) -> tuple[ClusterSamples, ...]:
        clusters = []
        for k in range(partition.num_clusters):
            train = 0
            held_out = 0
            for name in names:
                train += num_samples[shard_name(k, TRAIN, name)]
                held_out += num_samples[shard_name(k, HELD_OUT, name)]

            clusters.append(ClusterSamples(train, held_out))

        return tuple(clusters)

    encoder = plugins.image_encoder
    sizes = plugins.sizes_at(index["image_size"])
    columns = groups[0]["columns"]
    by_bucket = {}
    for bucket in sizes.buckets:
        counted = count(bucket.name)
        if counted != count():
            by_bucket[bucket] = counted

    buckets = tuple(by_bucket)
    if buckets:
        columns = plugins.encodings(plugins.stored_shape(buckets[0].x_shape))

    class_names = getattr(plugins.source, "class_names", None) or ()
    moments = []
    for group in groups:
        for entry in group["folders"].values():
            moments.append(entry["moments"])

    return Manifest(
        format_version=FORMAT_VERSION,
        source=asdict(config.source),
        attribution=plugins.source.attribution,
        images=inputs_of_images(config.images) | {"size": index["image_size"]},
        image_encoder=config.image_encoder,
        stores=encoder.stores,
        x_shape=sizes.x_shape,
        normalisation=encoder.normalisation,
        statistics=statistics_of(np.sum(moments, axis=0)),
        captions=config.captions,
        caption_encoder=config.caption_encoder,
        text_size=sizes.text_size,
        token_shape=sizes.token_shape,
        columns=columns,
        num_classes=sizes.num_classes,
        features=config.features,
        provenance=plugins.provenance(),
        num_read=index["num_read"],
        broken=index["broken"],
        filtered=index["filtered"],
        num_samples=index["num_samples"],
        num_without_caption=index["num_without_caption"],
        clusters=count(*plugins.bucket_names),
        priors=tuple(partition.priors.tolist()),
        seed=experiment.seed,
        index_sha256=indices,
        partition_sha256=sha256_file(prepared.partition_file),
        versions=plugins.versions(),
        class_names=list(class_names) or None,
        class_counts=class_counts.tolist(),
        buckets=buckets,
        bucket_samples=tuple(by_bucket.values()),
    )


def _merge_folders(shards: Path, groups: Sequence[Mapping[str, Any]]) -> tuple[Counter[str], dict[str, str]]:
    """Merge the indices of each folder, and remove what no group has written; return its samples and index's hash."""
    num_samples = Counter[str]()
    folders = dict[str, list[Path]]()
    kept = set[Path]()
    for group in groups:
        for name, entry in group["folders"].items():
            num_samples[name] += entry["samples"]
            folder = shards / name / entry["folder"]
            folders.setdefault(name, []).append(folder)
            kept |= {folder, *folder.parents}

    for pattern in ("*", "*/*", "*/*/*", "*/*/*/*"):
        for folder in list(shards.glob(pattern)):
            if folder.is_dir() and folder not in kept:
                shutil.rmtree(folder)

    for name, written in folders.items():
        merge_index(written, shards / name)

    return num_samples, {name: sha256_file(shards / name / "index.json") for name in sorted(folders)}


def buckets_in_words(manifest: Manifest) -> str:
    """Return the samples of each bucket, and which have no held-out ones; empty without buckets."""
    without = []
    for bucket, clusters in zip(manifest.buckets, manifest.bucket_samples, strict=True):
        if not any(cluster.held_out for cluster in clusters):
            without.append(bucket.name)

    line = manifest.bucket_line
    if without:
        line += f"; without held-out samples: {', '.join(without)}"

    return line


def statistics_of(moments: Moments) -> dict[str, list[float]]:
    """Return mean and std per channel from the sums of ``write_split``."""
    count, total, squares = moments
    mean = total / count
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(squares / count - mean**2, 0)).tolist()}
