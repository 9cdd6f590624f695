"""The report of a partition: a grid of images per cluster, and one HTML page that needs no network and no scripts."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.files import atomic_write_text
from ddm_lightning.core.grids import labelled_grid, save_png
from ddm_lightning.partition.build import displaced_fractions
from ddm_lightning.partition.columns import RowNumbers, Rows
from ddm_lightning.partition.partition import Partition
from ddm_lightning.prepare.plugins import Plugins
from ddm_lightning.prepare.prepared import Prepared, Thumbnails
from ddm_lightning.prepare.reading import count_buckets
from ddm_lightning.shards.manifest import Manifest

# Silhouettes need the square of this many distances: 128 MB.
MAX_ROWS = 4_000
_ZERO_DISTANCE = 1e-12
_CELL_PIXELS = 72
_GRID_COLUMNS = 18
_MIN_SHOWN = 6
_MAX_SHOWN = 36
_MAX_SHOWN_IN_ALL = 1152
_MAX_NEIGHBOURS = 3
_MAX_CAPTIONS = 8


@dataclass(frozen=True, eq=False)
class ReportData:
    """A prepared data set: n samples of the fit in k clusters, feature width d."""

    title: str
    attribution: str
    """Credit, printed on the page and on the grid of images."""
    seed: int
    """Chooses the measured samples and the images."""
    thumbnails: Thumbnails
    """Small images of a uniform sample of the data set."""
    features: Rows
    """[n d], of the samples on which the partition was fitted; may exceed memory."""
    clusters: RowNumbers
    """Cluster of each of these samples."""
    metric: str
    """``spherical`` (cosine distance) or ``euclidean``."""
    counts: Int[np.ndarray, "k"]
    """Samples in each cluster."""
    index: Mapping[str, Any]
    """Counts of ``write_index``: ``num_read``, ``broken``, ``filtered`` and ``num_without_caption``."""
    displaced: tuple[float, float] | None = None
    """Share of samples nearer to another cluster's mean, and the part of this share due to balancing."""
    buckets: Mapping[str, tuple[int, float, Sequence[int]]] = field(default_factory=dict)
    """Images of each bucket, the share of their pixels that is cropped away, and their numbers by cluster."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """First rows of the key figures, such as ``{"source": "openmoji"}``."""


@dataclass(frozen=True, eq=False)
class Measures:
    """Measures of a partition on ``num_rows`` uniformly chosen rows; NaN marks an undefined value."""

    num_rows: int
    silhouette: float
    """Mean of all rows."""
    cluster_silhouettes: Float[np.ndarray, "k"]
    """Mean of each cluster."""
    centroid_distances: Float[np.ndarray, "k k"]


def measure(data: ReportData) -> Measures:
    """Measure a partition on at most ``MAX_ROWS`` rows; deterministic for a seed."""
    num_samples = len(data.clusters)
    random = np.random.default_rng(data.seed)
    rows = np.sort(random.choice(num_samples, min(num_samples, MAX_ROWS), replace=False, shuffle=False))
    features = to_metric_space(data.features.take(rows), data.metric)
    clusters = torch.from_numpy(data.clusters[rows].astype(np.int64))
    silhouettes = compute_silhouettes(features, clusters, data.metric)
    means = []
    cluster_silhouettes = []
    for k in range(len(data.counts)):
        means.append(features[clusters == k].mean(0))
        cluster_silhouettes.append(float(silhouettes[clusters == k].mean()))

    centroids = to_metric_space(torch.stack(means).nan_to_num().numpy(), data.metric)
    distances = _distances(centroids, centroids, data.metric)
    return Measures(len(rows), float(silhouettes.mean()), np.array(cluster_silhouettes), distances.numpy())


def to_metric_space(features: Shaped[np.ndarray, "n d"], metric: str) -> Float[Tensor, "n d"]:
    """Convert features to float64, normalized to unit length for the spherical metric."""
    rows = torch.from_numpy(np.asarray(features, dtype=np.float64))
    if metric == "spherical":
        return normalize(rows, dim=1)

    return rows


def _distances(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], metric: str) -> Float[Tensor, "n m"]:
    if metric == "spherical":
        return 1 - x @ y.T

    return torch.cdist(x, y)


def compute_silhouettes(features: Float[Tensor, "n d"], clusters: Int[Tensor, "n"], metric: str) -> Float[Tensor, "n"]:
    """Compute each sample's silhouette, (b - a) / max(a, b) (Rousseeuw, "Silhouettes", 1987).

    a is the mean distance to the sample's own cluster, b the mean distance to the nearest other cluster. The value
    is 0 in a cluster of one sample, and NaN everywhere if there is only one cluster.

    Args:
        features: from ``to_metric_space``.
        clusters: cluster of each row.
        metric: ``spherical`` or ``euclidean``.
    """
    members = one_hot(clusters).to(features.dtype)
    members = members[:, members.any(0)]
    sizes = members.sum(0)
    if len(sizes) < 2:
        return torch.full((len(features),), torch.nan, dtype=features.dtype)

    total = _distances(features, features, metric).fill_diagonal_(0) @ members
    # Rounding errors must not separate samples with equal features.
    total[total < _ZERO_DISTANCE * sizes] = 0
    own = members.bool()
    a = total[own] / (members @ (sizes - 1)).clamp(min=1)
    b = (total / sizes).masked_fill(own, torch.inf).min(1).values
    value = (b - a) / torch.maximum(a, b)
    # NaN: a and b are 0.
    return torch.where((members @ sizes == 1) | value.isnan(), 0.0, value)


def report_partition(
    experiment: Experiment, plugins: Plugins, prepared: Prepared, thumbnails: Thumbnails, manifest: Manifest
) -> None:
    """Write ``clusters.png`` and ``report/report.html`` of a prepared data set."""
    config = experiment.prepare
    buckets = {}
    if manifest.buckets:
        counts = count_buckets(plugins.buckets, prepared.facts("bucket"), prepared.facts("cropped"))
        of_clusters = (*manifest.bucket_samples, manifest.clusters)
        names = (*(bucket.name for bucket in manifest.buckets), "all")
        for name, clusters in zip(names, of_clusters, strict=True):
            buckets[name] = (*counts[name], [cluster.train + cluster.held_out for cluster in clusters])

    partition = Partition.load(prepared.partition_file)
    sample, _ = prepared.sample(config.partition.fit_fraction)
    data = ReportData(
        title=f"{experiment.name}: clusters of {config.source.name}, by {config.features.name}",
        attribution=plugins.source.attribution,
        seed=experiment.seed,
        thumbnails=thumbnails,
        features=sample.features,
        clusters=prepared.clusters,
        metric=getattr(partition.rule, "metric", config.partition.metric),
        counts=partition.counts.numpy(),
        index=prepared.index,
        displaced=displaced_fractions(partition, sample.features, prepared.clusters, config.partition.device),
        buckets=buckets,
        facts={name: getattr(config, name.replace(" ", "_")).name for name in ("source", "features", "image encoder")},
    )
    save_png(prepared.folder / "clusters.png", cluster_grid(data))
    write_report(prepared.folder / "report" / "report.html", data)


def write_report(path: Path, data: ReportData) -> None:
    """Write the page about a partition; the same bytes for the same input."""
    measures = measure(data)
    num_clusters = len(data.counts)
    max_images = max(_MIN_SHOWN, min(_MAX_SHOWN, _MAX_SHOWN_IN_ALL // num_clusters))
    shown = choose_images(data.thumbnails.clusters, num_clusters, data.seed, max_images)
    templates = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["number"] = _number
    template = templates.get_template("report.html.j2")
    clusters = [_describe_cluster(data, measures, k, indices) for k, indices in enumerate(shown)]
    atomic_write_text(path, template.render(data=data, measures=measures, clusters=clusters))


def _number(value: float, style: str = ".3f") -> str:
    """Format a number, NaN as a dash."""
    if math.isnan(value):
        return "–"

    return format(value, style)


def _describe_cluster(data: ReportData, measures: Measures, cluster: int, indices: RowNumbers) -> dict[str, Any]:
    distances = measures.centroid_distances[cluster]
    neighbours = []
    for k in distances.argsort(kind="stable").tolist():
        if k != cluster:
            neighbours.append((k, distances[k]))

    images = []
    captions = dict[str, None]()
    for i in indices:
        text = data.thumbnails.captions[i]
        images.append((_image_url(data.thumbnails.images[i]), text))
        if text.strip():
            captions[text] = None

    return {
        "count": int(data.counts[cluster]),
        "silhouette": measures.cluster_silhouettes[cluster],
        "neighbours": neighbours[:_MAX_NEIGHBOURS],
        "images": images,
        "captions": [*captions][:_MAX_CAPTIONS],
    }


def _image_url(image: UInt8[np.ndarray, "s s 3"]) -> str:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, format="WEBP", quality=90)
    return f"data:image/webp;base64,{base64.b64encode(stream.getvalue()).decode('ascii')}"


def choose_images(clusters: RowNumbers, num_clusters: int, seed: int, max_images: int) -> list[RowNumbers]:
    """Choose the indices of at most ``max_images`` random images of each cluster."""
    chosen = []
    for cluster in range(num_clusters):
        members = np.flatnonzero(clusters == cluster)
        chosen.append(np.random.default_rng([seed, cluster]).permutation(members)[:max_images])

    return chosen


def cluster_grid(data: ReportData) -> Image.Image:
    """Arrange random images in one row per cluster, labelled with the cluster's size and share."""
    chosen = choose_images(data.thumbnails.clusters, len(data.counts), data.seed, _GRID_COLUMNS)
    rows = []
    for k, (count, indices) in enumerate(zip(data.counts, chosen, strict=True)):
        label = f"cluster {k} · {count:,} ({count / data.counts.sum():.1%})"
        rows.append((label, list(data.thumbnails.images[indices])))

    scale = max(1, round(_CELL_PIXELS / data.thumbnails.images.shape[1]))
    return labelled_grid(rows, scale, data.title, footer=data.attribution)
