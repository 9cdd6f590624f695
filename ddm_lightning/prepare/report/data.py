"""What the report is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int, UInt8

from ddm_lightning.prepare.rows import Rows


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
