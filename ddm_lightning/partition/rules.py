"""The rules by which a sample finds its cluster: nearest fine centroid, hash of its key, or its label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.partition.kmeans import repair
from ddm_lightning.partition.nearest import nearest


class Rule(Protocol):
    """What a kind of partition knows; ``tensors`` and ``settings`` (plain JSON) are all of it, for the file."""

    kind: ClassVar[str]

    def assign(
        self, features: Shaped[np.ndarray, "n d"], labels: Int[np.ndarray, "n"], keys: Sequence[str], device: str
    ) -> Int64[np.ndarray, "n"]:
        """The cluster of each sample."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """What is stored as tensors."""
        ...

    def settings(self) -> dict[str, Any]:
        """What is stored as JSON."""
        ...


@dataclass(frozen=True)
class NearestCentroid:
    """Of the fine centroid that is nearest; kind ``kmeans``."""

    kind: ClassVar[str] = "kmeans"
    fine_centroids: Float[Tensor, "f d"]
    cluster_of_fine: Int64[Tensor, "f"]
    centroids: Float[Tensor, "k d"]
    """The means of the clusters: fine centroids weighted by their samples."""
    metric: str
    """``spherical`` or ``euclidean``."""
    features: str = ""
    """What made the features, so that others are not compared with them; empty when nobody said."""

    def assign(
        self, features: Shaped[np.ndarray, "n d"], labels: Int[np.ndarray, "n"], keys: Sequence[str], device: str
    ) -> Int64[np.ndarray, "n"]:
        """The cluster of each sample's nearest fine centroid; features need not be normalised."""
        size = self.fine_centroids.shape[1]
        if features.shape[1] != size:
            raise UserError(
                f"partition of features with {size} entries: these have {features.shape[1]}; "
                "use the features that it was made of"
            )
        found = nearest(features, self.fine_centroids, self.metric, device, name_of=lambda row: repr(keys[row]))
        return self.cluster_of_fine[found].numpy()

    def tensors(self) -> dict[str, Tensor]:
        """Both stages' centroids, and how they hang together."""
        return {
            "fine_centroids": self.fine_centroids,
            "cluster_of_fine": self.cluster_of_fine,
            "centroids": self.centroids,
        }

    def settings(self) -> dict[str, Any]:
        """Metric and name of the features."""
        return {"metric": self.metric, "features": self.features}


@dataclass(frozen=True)
class KeyHash:
    """By a hash of seed and key, cut where the samples that it was made of fall into equal parts; kind ``random``."""

    kind: ClassVar[str] = "random"
    cuts: Int64[Tensor, "k_minus_1"]
    """Ascending; cluster k begins at ``cuts[k - 1]``."""
    seed: int

    @classmethod
    def equal(cls, keys: Sequence[str], num_clusters: int, seed: int) -> KeyHash:
        """Cut so that clusters of these keys, if all different, have equal sizes, to one sample."""
        if num_clusters == 1:
            return cls(torch.empty(0, dtype=torch.int64), seed)
        ranks = [len(keys) * k // num_clusters for k in range(1, num_clusters)]
        return cls(torch.from_numpy(np.partition(hashes(keys, seed), ranks)[ranks]), seed)

    def assign(
        self, features: Shaped[np.ndarray, "n d"], labels: Int[np.ndarray, "n"], keys: Sequence[str], device: str
    ) -> Int64[np.ndarray, "n"]:
        """The part of each key's hash; nothing else is looked at."""
        return np.searchsorted(self.cuts.numpy(), hashes(keys, self.seed), side="right")

    def tensors(self) -> dict[str, Tensor]:
        """The cuts."""
        return {"cuts": self.cuts}

    def settings(self) -> dict[str, Any]:
        """The seed."""
        return {"seed": self.seed}


@dataclass(frozen=True)
class ClusterOfLabel:
    """By class: a cluster holds whole classes; kind ``labels``."""

    kind: ClassVar[str] = "labels"
    cluster_of_label: Int64[Tensor, "classes"]
    """-1 for a class that had no samples."""

    @classmethod
    def packed(cls, labels: Int[np.ndarray, "n"], num_clusters: int, limit: float) -> ClusterOfLabel:
        """Give the largest class that is left to the emptiest cluster (Graham 1969, LPT), then move and swap classes
        until no cluster has more than ``limit`` samples, as far as that gets.

        Raises:
            ValueError: fewer classes than clusters.
        """
        sizes = torch.from_numpy(np.bincount(labels))
        present = sizes.nonzero().squeeze(1)
        if len(present) < num_clusters:
            raise ValueError(f"the source has only {len(present)} classes with samples")
        weights = sizes[present].double()
        home = torch.zeros(len(present), dtype=torch.int64)
        load = torch.zeros(num_clusters, dtype=torch.float64)
        for position in weights.argsort(descending=True, stable=True).tolist():
            home[position] = load.argmin()
            load[home[position]] += weights[position]
        home = repair(torch.zeros(len(present), num_clusters, dtype=torch.float64), weights, home, limit)
        table = torch.full((len(sizes),), -1)
        table[present] = largest_first(home, sizes[present], num_clusters)
        return cls(table)

    def assign(
        self, features: Shaped[np.ndarray, "n d"], labels: Int[np.ndarray, "n"], keys: Sequence[str], device: str
    ) -> Int64[np.ndarray, "n"]:
        """The cluster of each sample's class.

        Raises:
            UserError: a class that had no samples when the partition was made.
        """
        table = self.cluster_of_label.numpy()
        known = (labels >= 0) & (labels < len(table))
        clusters = np.where(known, table[np.where(known, labels, 0)], -1)
        if len(clusters) and clusters.min() < 0:
            position = int(clusters.argmin())
            raise UserError(
                f"sample {keys[position]!r}: its class {labels[position]} had no samples when the partition was made; "
                "make a new partition"
            )
        return clusters

    def tensors(self) -> dict[str, Tensor]:
        """The table."""
        return {"cluster_of_label": self.cluster_of_label}

    def settings(self) -> dict[str, Any]:
        """Nothing else."""
        return {}


def rule_of(kind: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], num_clusters: int) -> Rule:
    """The rule that a file describes.

    Raises:
        ValueError: parts that do not belong together.
        KeyError: a part is missing.
    """
    if kind == NearestCentroid.kind:
        fine, home, centroids = (tensors[name] for name in ("fine_centroids", "cluster_of_fine", "centroids"))
        if fine.ndim != 2 or home.shape != fine.shape[:1] or centroids.shape != (num_clusters, fine.shape[1]):
            raise ValueError("centroids that do not fit together")
        if settings["metric"] not in ("spherical", "euclidean") or not torch.isfinite(fine).all():
            raise ValueError("an unknown metric or centroids that are not finite")
        if not 0 <= int(home.min()) <= int(home.max()) < num_clusters:
            raise ValueError("a cluster out of range")
        return NearestCentroid(fine, home, centroids, settings["metric"], settings["features"])
    if kind == KeyHash.kind:
        if tensors["cuts"].shape != (num_clusters - 1,):
            raise ValueError("cuts that do not make as many clusters as it counts")
        return KeyHash(tensors["cuts"], settings["seed"])
    if kind == ClusterOfLabel.kind:
        table = tensors["cluster_of_label"]
        if not -1 <= int(table.min()) <= int(table.max()) < num_clusters:
            raise ValueError("a cluster out of range")
        return ClusterOfLabel(table)
    raise ValueError(f"unknown kind {kind!r}")


def hashes(keys: Sequence[str], seed: int) -> Int64[np.ndarray, "n"]:
    """63 bits a key that look random, and others for each seed."""
    secret = str(seed).encode()
    # The secret also makes it independent of the plain hash of the same keys that decides who is held out.
    digests = (blake2b(key.encode(), digest_size=8, key=secret).digest() for key in keys)
    return (np.frombuffer(b"".join(digests), dtype=">u8") >> np.uint64(1)).astype(np.int64)


def largest_first(clusters: Int64[Tensor, "m"], sizes: Int64[Tensor, "m"], num_clusters: int) -> Int64[Tensor, "m"]:
    """Number the clusters by size, so that their names do not hang on the order in which they were drawn."""
    counts = torch.zeros(num_clusters, dtype=torch.int64).index_add_(0, clusters, sizes)
    rank = torch.empty_like(counts)
    rank[counts.argsort(descending=True, stable=True)] = torch.arange(num_clusters)
    return rank[clusters]
