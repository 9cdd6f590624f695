"""The partition of a data set into K clusters as data: the rule that assigns samples, and the size of each cluster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write
from ddm_lightning.partition.columns import Rows
from ddm_lightning.partition.kmeans import Centroids, PerCluster, repair
from ddm_lightning.partition.nearest import OnProgress, nearest_of_rows

FORMAT_VERSION = 2


class Samples(NamedTuple):
    """The samples to assign."""

    features: Rows
    """``[n d]``, float16 or float32; need not be normalised."""
    labels: Int[np.ndarray, "n"]
    """Class of each sample."""
    keys: Sequence[str]
    """Permanent name of each sample."""


@dataclass(frozen=True, kw_only=True)
class CentroidRule:
    """Assigns a sample by the distance of its features from centroids."""

    centroids: Centroids
    """Means of the clusters in the fit."""
    metric: str
    """``spherical`` or ``euclidean``."""
    features: str = ""
    """Name of the feature network; a partition is not applied to features of another. Empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class NearestCentroid(CentroidRule):
    """Assigns a sample to the cluster of its nearest fine centroid; kind ``kmeans``."""

    kind = "kmeans"
    fine_centroids: Float[Tensor, "f d"]
    cluster_of_fine: Int64[Tensor, "f"]

    def assign(
        self, samples: Samples, device: str = "cpu", on_progress: OnProgress = lambda *_: None
    ) -> Int64[np.ndarray, "n"]:
        """Return the cluster of each sample's nearest fine centroid.

        Raises:
            UserError: features are not finite.
        """
        found = nearest_of_rows(samples.features, self.fine_centroids, self.metric, device, on_progress)
        return self.cluster_of_fine.numpy()[found]


@dataclass(frozen=True, kw_only=True)
class PricedCentroid(CentroidRule):
    """Assigns a sample to the cluster of least squared distance plus price; kind ``flat``."""

    kind = "flat"
    prices: PerCluster
    """At least 0; a price keeps a cluster in a crowded place from growing too large."""

    def assign(
        self, samples: Samples, device: str = "cpu", on_progress: OnProgress = lambda *_: None
    ) -> Int64[np.ndarray, "n"]:
        """Return each sample's cluster.

        Raises:
            UserError: features are not finite.
        """
        found = nearest_of_rows(samples.features, self.centroids, self.metric, device, on_progress, self.prices)
        return found.astype(np.int64)


@dataclass(frozen=True)
class KeyHash:
    """Assigns a sample by a hash of seed and key; kind ``random``."""

    kind = "random"
    cuts: Int64[Tensor, "k_minus_1"]
    """Ascending; cluster k begins at ``cuts[k - 1]``."""
    seed: int

    @classmethod
    def equal(cls, keys: Sequence[str], num_clusters: int, seed: int) -> KeyHash:
        """Cut the hashes of ``keys`` into equal parts; if all keys differ, sizes differ by one sample at most."""
        ranks = [len(keys) * k // num_clusters for k in range(1, num_clusters)]
        return cls(torch.from_numpy(np.sort(hashes(keys, seed))[ranks]), seed)

    def assign(
        self, samples: Samples, device: str = "cpu", on_progress: OnProgress = lambda *_: None
    ) -> Int64[np.ndarray, "n"]:
        """Return the cluster of each key's hash."""
        return np.searchsorted(self.cuts.numpy(), hashes(samples.keys, self.seed), side="right")


@dataclass(frozen=True)
class ClusterOfLabel:
    """Assigns a sample by its class, so that clusters hold whole classes; kind ``labels``."""

    kind = "labels"
    cluster_of_label: Int64[Tensor, "classes"]
    """-1 for a class without samples."""

    @classmethod
    def packed(cls, labels: Int[np.ndarray, "n"], num_clusters: int, limit: float) -> ClusterOfLabel:
        """Pack classes into clusters of nearly equal size.

        The largest remaining class goes to the emptiest cluster (LPT, Graham 1969). Then classes are moved and swapped
        until no cluster has more than ``limit`` samples, or until that no longer helps.

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
        self, samples: Samples, device: str = "cpu", on_progress: OnProgress = lambda *_: None
    ) -> Int64[np.ndarray, "n"]:
        """Return the cluster of each sample's class.

        Raises:
            UserError: a class has no cluster.
        """
        table = np.append(self.cluster_of_label.numpy(), -1)
        clusters = table[np.minimum(samples.labels, len(table) - 1)]
        if (clusters < 0).any():
            first = int(clusters.argmin())
            raise UserError(
                f"sample {samples.keys[first]!r}: the partition has no cluster for its class {samples.labels[first]}; "
                "raise prepare.partition.fit_fraction or, with kind = existing, make a new partition"
            )

        return clusters


Rule: TypeAlias = NearestCentroid | PricedCentroid | KeyHash | ClusterOfLabel
"""A way to assign each sample by itself. A file stores its fields alone, as tensors and plain JSON."""
_RULES: dict[str, type[Rule]] = {rule.kind: rule for rule in get_args(Rule)}


@dataclass(frozen=True)
class Partition:
    """The rule that assigns samples, and the number of samples in each cluster."""

    rule: Rule
    counts: Int64[Tensor, "k"]

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.counts)

    @property
    def priors(self) -> PerCluster:
        """Each cluster's share of the samples, float64."""
        return self.counts.double() / self.counts.sum()

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically; equal partitions give equal bytes."""
        tensors = {"counts": self.counts.contiguous()}
        settings = {}
        for name, value in vars(self.rule).items():
            if isinstance(value, Tensor):
                tensors[name] = value.contiguous()
            else:
                settings[name] = value

        header = {"kind": "partition", "format_version": FORMAT_VERSION, "rule": self.rule.kind, "settings": settings}
        # One key only: safetensors writes several in no fixed order.
        data = save(tensors, {"ddm_lightning": json.dumps(header)})
        atomic_write(path, lambda temporary: temporary.write_bytes(data))

    @classmethod
    def load(cls, path: Path) -> Partition:
        """Read a file that ``save`` wrote.

        Raises:
            UserError: the file is missing, is not a safetensors file, or is not a valid partition of this format.
        """
        try:
            with safe_open(path, framework="pt") as stored:
                header = json.loads((stored.metadata() or {}).get("ddm_lightning", "{}"))
                if header.get("kind") != "partition" or header.get("format_version") != FORMAT_VERSION:
                    raise ValueError(f"is not a partition of format {FORMAT_VERSION}")

                values = header["settings"] | {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118

            counts = values.pop("counts")
            return cls(_RULES[header["rule"]](**values), counts)
        except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
            raise UserError(f"{path}: the partition cannot be read ({error}); run prepare again") from None


def hashes(keys: Sequence[str], seed: int) -> Int64[np.ndarray, "n"]:
    """Return 63 pseudo-random bits per key, different for each seed."""
    secret = str(seed).encode()
    # With a secret, the hash is independent of the plain hash of the same keys that selects held-out samples.
    digests = (blake2b(key.encode(), digest_size=8, key=secret).digest() for key in keys[:])
    return np.fromiter((int.from_bytes(digest, "big") >> 1 for digest in digests), np.int64, len(keys))


def largest_first(clusters: Int64[Tensor, "m"], sizes: Int64[Tensor, "m"], num_clusters: int) -> Int64[Tensor, "m"]:
    """Renumber the clusters by descending total size, so that numbers do not depend on random order."""
    counts = torch.zeros(num_clusters, dtype=torch.int64).index_add_(0, clusters, sizes)
    rank = torch.empty_like(counts)
    rank[counts.argsort(descending=True, stable=True)] = torch.arange(num_clusters)
    return rank[clusters]
