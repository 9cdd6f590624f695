"""How well clusters are apart, which of them are neighbours, and a map of the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped, UInt8
from torch import Tensor

from ddm_lightning.partition.rows import Rows

# Silhouettes of Euclidean distances take the square of this.
MOST_ROWS = 10_000
_ROWS_AT_ONCE = 1024
_NOTHING = 1e-12


@dataclass(frozen=True, eq=False)
class Measures:
    """What is measured of a partition, on m rows drawn evenly from all; NaN where there is nothing to measure."""

    rows: Int64[np.ndarray, "m"]
    silhouettes: Float[np.ndarray, "m"]
    cluster_silhouettes: Float[np.ndarray, "k"]
    """Mean of each cluster."""
    centroid_distances: Float[np.ndarray, "k k"]
    second_choices: Float[np.ndarray, "k k"]
    """Share of the row's cluster whose nearest centroid, its own left out, is the column's."""
    projection: Projection
    positions: Float[np.ndarray, "m 2"]


@dataclass(frozen=True, eq=False)
class Projection:
    """The plane in which samples vary most."""

    mean: Float[Tensor, "d"]
    axes: Float[Tensor, "d 2"]
    explained: tuple[float, float]
    """Share of the variance along each axis."""

    def __call__(self, features: Float[Tensor, "n d"]) -> Float[np.ndarray, "n 2"]:
        """Positions on the map."""
        return ((features - self.mean) @ self.axes).numpy()


def measure(data: ReportData, seed: int) -> Measures:
    """Measure a partition on at most ``MOST_ROWS`` rows; the same data and seed give the same figures."""
    rows = some_rows(data.num_samples, MOST_ROWS, seed)
    features = prepared(data.features.take(rows), data.metric)
    centroids = prepared(data.centroids, data.metric)
    clusters = torch.from_numpy(data.clusters[rows].astype(np.int64))
    silhouettes = silhouette(features, clusters, data.metric)
    of_clusters = [float(silhouettes[clusters == k].mean()) for k in range(data.num_clusters)]
    projection = principal_plane(features)
    return Measures(
        rows,
        silhouettes.numpy(),
        np.array(of_clusters),
        distances(centroids, centroids, data.metric).fill_diagonal_(0).numpy(),
        second_choices(features, clusters, centroids, data.metric).numpy(),
        projection,
        projection(features),
    )


def some_rows(num: int, most: int, seed: int) -> Int64[np.ndarray, "m"]:
    """At most ``most`` of ``num`` rows, drawn evenly, in order."""
    if num <= most:
        return np.arange(num)
    return np.sort(np.random.default_rng(seed).choice(num, most, replace=False, shuffle=False))


def prepared(features: Shaped[np.ndarray, "n d"], metric: str) -> Float[Tensor, "n d"]:
    """Features as they are compared: float64, of unit length for the spherical metric."""
    rows = torch.from_numpy(np.asarray(features, dtype=np.float64))
    return torch.nn.functional.normalize(rows, dim=1) if metric == "spherical" else rows


def distances(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], metric: str) -> Float[Tensor, "n m"]:
    """Cosine or Euclidean distances between rows of ``prepared``."""
    return 1 - x @ y.T if metric == "spherical" else torch.cdist(x, y)


def silhouette(features: Float[Tensor, "n d"], clusters: Int[Tensor, "n"], metric: str) -> Float[Tensor, "n"]:
    """(b - a) / max(a, b) of each sample: a is its mean distance to its own cluster, b to the nearest other.

    Rousseeuw, "Silhouettes", 1987. 0 in a cluster of one; NaN for all samples where there is a single cluster.

    Args:
        features: as ``prepared`` gives them.
        clusters: of each row.
        metric: ``spherical`` or ``euclidean``.
    """
    members = torch.nn.functional.one_hot(clusters).to(features.dtype)
    members = members[:, members.any(0)]
    sizes = members.sum(0)
    if len(sizes) < 2:
        return torch.full((len(features),), torch.nan, dtype=features.dtype)
    if metric == "spherical":
        # Cosine distances are linear in y, so that a cluster's sum stands for its members.
        total = sizes - features @ (features.T @ members)
        total -= members * (1 - features.square().sum(1, keepdim=True))
    else:
        total = torch.empty_like(members)
        for start in range(0, len(features), _ROWS_AT_ONCE):
            block = distances(features[start : start + _ROWS_AT_ONCE], features, metric)
            block.diagonal(start).zero_()
            total[start : start + len(block)] = block @ members
    # Rounding alone must not decide between samples that lie in one place.
    total[total < _NOTHING * sizes] = 0
    own = members.bool()
    a = total[own] / (members @ (sizes - 1)).clamp(min=1)
    b = (total / sizes).masked_fill(own, torch.inf).min(1).values
    value = (b - a) / torch.maximum(a, b)
    # Two samples in one place, or alone in a cluster.
    return torch.where((members @ sizes == 1) | value.isnan(), 0.0, value)


def second_choices(
    features: Float[Tensor, "n d"], clusters: Int[Tensor, "n"], centroids: Float[Tensor, "k d"], metric: str
) -> Float[Tensor, "k k"]:
    """For each cluster, the share of its samples whose nearest centroid, its own left out, is each other cluster's.

    A row is NaN where the cluster has no sample, and everything is with a single cluster.
    """
    num = len(centroids)
    if num < 2:
        return torch.full((num, num), torch.nan, dtype=features.dtype)
    apart = distances(features, centroids, metric)
    apart[torch.arange(len(features)), clusters] = torch.inf
    pairs = clusters * num + apart.argmin(1)
    table = pairs.bincount(minlength=num * num).view(num, num).to(features.dtype)
    return table / table.sum(1, keepdim=True)


def principal_plane(features: Float[Tensor, "n d"]) -> Projection:
    """Principal component analysis, the sign of each axis fixed by its largest entry.

    Linear, so that a repetition on another machine gives the same map, and no structure is invented, as
    neighbourhood embeddings do.
    """
    mean = features.mean(0)
    centred = features - mean
    variances, axes = torch.linalg.eigh(centred.T @ centred)
    variances, axes = variances.flip(0).clamp(min=0), axes.flip(1)[:, :2]
    if axes.shape[1] < 2:
        axes = torch.cat([axes, torch.zeros_like(axes)], dim=1)
        variances = torch.cat([variances, torch.zeros_like(variances)])
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    axes = torch.where(largest < 0, -axes, axes)
    shares = variances / variances.sum().clamp(min=torch.finfo(variances.dtype).tiny)
    return Projection(mean, axes, (float(shares[0]), float(shares[1])))


@dataclass(frozen=True)
class Cost:
    """What one stage took, or one column takes, for all prepared samples."""

    seconds: float | None = None
    num_bytes: int | None = None
    """Written to disk."""


@dataclass(frozen=True)
class KMeansSettings:
    """What the time of two-stage k-means hangs on, besides samples and features."""

    num_fine: int
    """Fine centroids."""
    iterations: int
    """Of the fine stage."""
    fit_fraction: float
    """Part of the samples on which they are fitted."""


@dataclass(frozen=True, eq=False)
class ReportData:
    """A prepared data set as the report sees it: n samples, K clusters, m of the pictures.

    Raises:
        ValueError: thumbnails, their rows and captions do not belong together, or the metric is unknown.
    """

    thumbnails: UInt8[np.ndarray, "m s s 3"]
    """Small pictures of some samples, drawn evenly from all."""
    thumbnail_rows: Int[np.ndarray, "m"]
    """Which samples these are."""
    captions: Sequence[str]
    """One a thumbnail, of any length and script; or none at all."""
    features: Rows
    """[n d]; read in part, so it may be larger than memory."""
    clusters: Int[np.ndarray, "n"]
    centroids: Float[np.ndarray, "k d"]
    """Of the K clusters."""
    metric: str
    """``spherical`` (cosine distance) or ``euclidean``."""
    counts: Int[np.ndarray, "k"]
    """Samples in each cluster."""
    num_read: int
    """Samples of the source, the broken ones included."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """Cause -> samples that were left out."""
    num_without_caption: int = 0
    """Prepared samples whose caption is empty."""
    num_out_of_cluster: int = 0
    """Samples that the experts of other clusters train on, too, each counted as often as it is."""
    displaced: tuple[float, float] | None = None
    """Share of the samples nearer to another cluster's mean, and the part of it that balance costs."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Names to be printed, such as ``{"source": "openmoji", "features": "efficientnet-lite0"}``."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Stage or column -> what it cost."""
    kmeans: KMeansSettings | None = None
    """None where the partition is none of k-means."""

    def __post_init__(self) -> None:
        num = len(self.thumbnails)
        if len(self.thumbnail_rows) != num or (self.captions and len(self.captions) != num):
            raise ValueError(f"{num} thumbnails, {len(self.thumbnail_rows)} rows and {len(self.captions)} captions")
        if self.metric not in ("spherical", "euclidean"):
            raise ValueError(f"metric {self.metric!r} is neither 'spherical' nor 'euclidean'")

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.clusters)

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.counts)
