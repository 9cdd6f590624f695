"""Measure a partition: silhouettes, neighbouring clusters and a plane on which to map the samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped, UInt8
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from ddm_lightning.partition.columns import Rows

# Silhouettes need the square of this many distances: 128 MB.
MAX_ROWS = 4_000
_ZERO_DISTANCE = 1e-12


@dataclass(frozen=True, eq=False)
class ReportData:
    """A prepared data set: n samples in k clusters, m thumbnails, feature width d."""

    thumbnails: UInt8[np.ndarray, "m s s 3"]
    """Small images of a uniform sample of the data set."""
    thumbnail_rows: Int[np.ndarray, "m"]
    """Row of each thumbnail's sample."""
    captions: Sequence[str]
    """Caption of each thumbnail; empty for a data set without captions."""
    features: Rows
    """[n d]; may exceed memory."""
    clusters: Int[np.ndarray, "n"]
    """Cluster of each sample."""
    metric: str
    """``spherical`` (cosine distance) or ``euclidean``."""
    counts: Int[np.ndarray, "k"]
    """Samples in each cluster."""
    num_read: int
    """Samples of the source, including broken ones."""
    broken: Mapping[str, int] = field(default_factory=dict)
    """Skipped samples by cause."""
    num_without_caption: int = 0
    num_out_of_cluster: int = 0
    """Copies of samples that train experts of other clusters."""
    displaced: tuple[float, float] | None = None
    """Share of samples nearer to another cluster's mean, and the part of this share due to balancing."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """First rows of the key figures, such as ``{"source": "openmoji"}``."""

    @property
    def num_samples(self) -> int:
        """Number of samples, n."""
        return len(self.clusters)

    @property
    def num_clusters(self) -> int:
        """Number of clusters, k."""
        return len(self.counts)


@dataclass(frozen=True, eq=False)
class Plane:
    """The first two principal components."""

    mean: Float[Tensor, "d"]
    axes: Float[Tensor, "d 2"]
    explained: tuple[float, float]
    """Share of the variance along each axis."""

    def project(self, features: Float[Tensor, "n d"]) -> Float[np.ndarray, "n 2"]:
        """Coordinates of the samples on the plane."""
        return ((features - self.mean) @ self.axes).numpy()


@dataclass(frozen=True, eq=False)
class Measures:
    """Measures of a partition on m uniformly chosen rows; NaN marks an undefined value."""

    rows: Int64[np.ndarray, "m"]
    silhouettes: Float[np.ndarray, "m"]
    cluster_silhouettes: Float[np.ndarray, "k"]
    """Mean of each cluster."""
    centroid_distances: Float[np.ndarray, "k k"]
    second_choices: Float[np.ndarray, "k k"]
    """Row per cluster: the share of its samples for which each other cluster's centroid is the second nearest."""
    plane: Plane


def measure(data: ReportData, seed: int) -> Measures:
    """Measure a partition on at most ``MAX_ROWS`` rows; deterministic for a seed."""
    rows = choose_rows(data.num_samples, MAX_ROWS, seed)
    features = to_metric_space(data.features.take(rows), data.metric)
    clusters = torch.from_numpy(data.clusters[rows].astype(np.int64))
    members = [clusters == k for k in range(data.num_clusters)]
    centroids = torch.stack([features[chosen].mean(0) for chosen in members]).nan_to_num()
    centroids = to_metric_space(centroids.numpy(), data.metric)
    silhouettes = compute_silhouettes(features, clusters, data.metric)
    return Measures(
        rows,
        silhouettes.numpy(),
        np.array([float(silhouettes[chosen].mean()) for chosen in members]),
        _distances(centroids, centroids, data.metric).fill_diagonal_(0).numpy(),
        count_second_choices(features, clusters, centroids, data.metric).numpy(),
        fit_plane(features),
    )


def choose_rows(num_rows: int, max_rows: int, seed: int) -> Int64[np.ndarray, "m"]:
    """Choose at most ``max_rows`` of ``num_rows`` rows uniformly; in ascending order."""
    if num_rows <= max_rows:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, max_rows, replace=False, shuffle=False))


def to_metric_space(features: Shaped[np.ndarray, "n d"], metric: str) -> Float[Tensor, "n d"]:
    """Convert features to float64, normalized to unit length for the spherical metric."""
    rows = torch.from_numpy(np.asarray(features, dtype=np.float64))
    return normalize(rows, dim=1) if metric == "spherical" else rows


def _distances(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"], metric: str) -> Float[Tensor, "n m"]:
    return 1 - x @ y.T if metric == "spherical" else torch.cdist(x, y)


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


def count_second_choices(
    features: Float[Tensor, "n d"], clusters: Int[Tensor, "n"], centroids: Float[Tensor, "k d"], metric: str
) -> Float[Tensor, "k k"]:
    """Compute, in a row per cluster, the share of its samples for which each other cluster is the second nearest.

    The row of an empty cluster is NaN. With one cluster the result has no meaning.
    """
    num_clusters = len(centroids)
    distances = _distances(features, centroids, metric)
    distances[torch.arange(len(features)), clusters] = torch.inf
    pairs = clusters * num_clusters + distances.argmin(1)
    table = pairs.bincount(minlength=num_clusters**2).view(num_clusters, num_clusters).to(features.dtype)
    return table / table.sum(1, keepdim=True)


def fit_plane(features: Float[Tensor, "n d"]) -> Plane:
    """Fit the first two principal components; the largest entry of each axis is positive.

    Unlike neighbourhood embeddings, a linear map is reproducible across machines and invents no structure.
    """
    mean = features.mean(0)
    centred = features - mean
    variances, axes = torch.linalg.eigh(centred.T @ centred)
    variances = variances.clamp(min=0)
    shares = variances / variances.sum().clamp(min=torch.finfo(variances.dtype).tiny)
    axes, shares = axes.flip(1)[:, :2], shares.flip(0)[:2]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return Plane(mean, torch.where(largest < 0, -axes, axes), (float(shares[0]), float(shares[1])))
