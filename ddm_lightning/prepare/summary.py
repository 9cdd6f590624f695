"""The end of ``prepare``: the report, the manifest, and a line per stage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from ddm_lightning.config import Experiment, PrepareConfig
from ddm_lightning.core.columns import Rows
from ddm_lightning.core.files import read_json
from ddm_lightning.core.formatting import amount
from ddm_lightning.partition.partition import NearestCentroid, Partition
from ddm_lightning.prepare.encode import FEATURES
from ddm_lightning.prepare.prepared import Ledger, Prepared
from ddm_lightning.prepare.reading import Plugins
from ddm_lightning.prepare.report.figures import save_cluster_grid
from ddm_lightning.prepare.report.measures import ReportData
from ddm_lightning.prepare.report.page import write_report
from ddm_lightning.prepare.write_shards import samples_of
from ddm_lightning.shards.manifest import HELD_OUT, OUT_OF_CLUSTER, TRAIN, ClusterSamples, Manifest, shard_name
from ddm_lightning.shards.verify import num_samples_of, verify_shards

_MAX_ROWS_FOR_MEANS = 20_000


def write_images(experiment: Experiment, plugins: Plugins, prepared: Prepared) -> None:
    """Write ``clusters.png`` and ``report/``."""
    config, seed = experiment.prepare, experiment.seed
    used = {"source": config.source.name, "features": config.features.name, "image encoder": config.image_encoder.name}
    title = f"{experiment.name}: clusters of {config.source.name}, by {config.features.name}"
    attribution = plugins.source.attribution
    partition = Partition.load(prepared.partition_file)
    thumbnails, rows = prepared.thumbnails()
    features = prepared.rows(FEATURES, "features")
    facts = read_json(prepared.partition_facts_file, "the figures of the partition", "run prepare again")
    clusters, num_clusters = prepared.clusters, partition.num_clusters
    counts = np.bincount(clusters, minlength=num_clusters)
    credit: dict[str, Any] = {"title": title, "attribution": attribution, "seed": seed}
    save_cluster_grid(prepared.grid, thumbnails, clusters[rows], counts=counts, **credit)
    columns = samples_of(prepared, plugins).columns.items()
    data = ReportData(
        thumbnails=thumbnails,
        thumbnail_rows=rows,
        captions=prepared.texts("captions").take(rows).tolist(),
        features=features,
        clusters=clusters,
        centroids=_centroids(partition, features, clusters),
        metric=partition.rule.metric if isinstance(partition.rule, NearestCentroid) else config.partition.metric,
        counts=counts,
        num_read=prepared.index["num_read"],
        broken=prepared.index["broken"],
        num_without_caption=prepared.index["num_without_caption"],
        num_out_of_cluster=num_samples_of(prepared.shards.glob(f"*/{OUT_OF_CLUSTER}")),
        displaced=facts["displaced"] and tuple(facts["displaced"]),
        facts=used,
        column_bytes={name: len(rows) * rows.row_bytes for name, rows in columns},
        kmeans=config.partition if config.partition.kind == "kmeans" else None,
    )
    write_report(prepared.report, data, **credit)


def _centroids(partition: Partition, features: Rows, clusters: Int[np.ndarray, "n"]) -> Float[np.ndarray, "k d"]:
    """Return the partition's centroids, or means of some samples if it does not use features."""
    if isinstance(partition.rule, NearestCentroid):
        return partition.rule.centroids.float().numpy()
    some = np.linspace(0, len(features) - 1, min(len(features), _MAX_ROWS_FOR_MEANS)).astype(np.int64)
    rows, members = features.take(some).astype(np.float32), clusters[some]
    chosen = [members == k if (members == k).any() else slice(None) for k in range(partition.num_clusters)]
    return np.stack([rows[which].mean(0) for which in chosen])


def manifest_of(experiment: Experiment, plugins: Plugins, prepared: Prepared, ledger: Ledger) -> Manifest:
    """Describe the shards and how to read them."""
    config = experiment.prepare
    partition = Partition.load(prepared.partition_file)
    indices = {
        name.removeprefix("shards/").removesuffix("/index.json"): entry["sha256"]
        for name, entry in ledger.files("shards").items()
        if name.endswith("/index.json")
    }
    samples = {name: verify_shards(prepared.shards / name, hashes=False) for name in indices}
    clusters = tuple(
        ClusterSamples(*(samples.get(shard_name(k, split), 0) for split in (TRAIN, HELD_OUT, OUT_OF_CLUSTER)))
        for k in range(partition.num_clusters)
    )
    encoder, captions = plugins.image_encoder, plugins.caption_encoder
    total = sum(cluster.train + cluster.held_out for cluster in clusters)
    return Manifest(
        source=asdict(config.source),
        attribution=plugins.source.attribution,
        pictures={**asdict(config.pictures), "size": prepared.image_size},
        image_encoder=asdict(config.image_encoder),
        stores=encoder.stores,
        x_shape=encoder.x_shape(prepared.image_size),
        normalisation=encoder.normalisation,
        statistics=read_json(prepared.statistics_file, "the statistics of x_0", "run prepare again"),
        caption_encoder=asdict(config.caption_encoder) if config.caption_encoder else None,
        text_size=captions.size if captions else 0,
        token_shape=captions.token_shape if captions else None,
        columns=dict(samples_of(prepared, plugins).encodings),
        num_classes=plugins.source.num_classes,
        features=asdict(config.features),
        provenance=plugins.provenance(),
        num_read=prepared.index["num_read"],
        broken=prepared.index["broken"],
        num_samples=prepared.num_samples,
        num_without_caption=prepared.index["num_without_caption"],
        clusters=clusters,
        priors=tuple((cluster.train + cluster.held_out) / total for cluster in clusters),
        seed=experiment.seed,
        index_sha256=indices,
        partition_sha256=ledger.files("partition")["partition.safetensors"]["sha256"],
        versions=plugins.versions(),
        class_names=list(getattr(plugins.source, "class_names", None) or ()) or None,
    )


def outcome(stage: str, prepared: Prepared, config: PrepareConfig, num_kept: int) -> str:
    """Return the end of the line that reports a finished stage; may be empty.

    Args:
        stage: name of the stage.
        prepared: the folder after the stage.
        config: the ``prepare`` section.
        num_kept: number of parts encoded by an earlier run.
    """
    if stage == "encode":
        num_parts = len(prepared.parts)
        kept = f", {num_kept:,} already encoded" if num_kept else ""
        return f": {num_parts:,} part{'s' * (num_parts != 1)}{kept}"
    if stage == "index":
        index = prepared.index
        causes = ", ".join(f"{cause}: {count:,}" for cause, count in index["broken"].items())
        skipped = f"; skipped: {causes}; see {prepared.broken_file}" if causes else ""
        num_without = index["num_without_caption"]
        without = f", {num_without:,} of them without a caption" if num_without else ""
        odd = "".join(f", {count:,} of them {how}" for how, count in index["odd_shapes"].items())
        return f": {index['num_samples']:,} of {index['num_read']:,} samples{without}{odd}{skipped}"
    if stage == "partition":
        sizes = np.bincount(prepared.clusters, minlength=config.partition.num_clusters)
        return f": {len(sizes)} clusters of {sizes.min():,} to {sizes.max():,} samples"
    if stage == "shards":
        size = sum(path.stat().st_size for path in prepared.shards.rglob("*") if path.is_file())
        others = num_samples_of(prepared.shards.glob(f"*/{OUT_OF_CLUSTER}"))
        mixed = f", {others:,} of them copied for another cluster's expert" if others else ""
        return f": {prepared.num_samples:,} samples{mixed}, {amount(size)}"
    if stage == "upload":
        uploaded = read_json(prepared.uploaded_file, "the record of the upload", "run prepare again")["sha256"]
        size = sum((prepared.shards / name).stat().st_size for name in uploaded)
        use = f"islands stream them with island.shards={config.shards.remote}"
        return f": {len(uploaded)} files, {amount(size)}, each read back; {use}"
    return ""
