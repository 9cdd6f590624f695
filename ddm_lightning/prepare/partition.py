"""The partition of a data set into K clusters, as data.

Two stages, as in MoDE (arXiv 2404.16030), whose code the DDM paper (arXiv 2501.05450) used: balanced
k-means of a part of the samples to fine centroids, then balanced k-means of the fine centroids to K
clusters. A sample belongs to the cluster of its nearest fine centroid. The second stage weighs a fine
centroid by the samples that it holds, because what has to be balanced is samples, not centroids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ddm_lightning.config import PartitionConfig
from ddm_lightning.errors import UserError
from ddm_lightning.files import atomic_write
from ddm_lightning.prepare.kmeans import balanced_kmeans, capacity, squared_distances

FORMAT_VERSION = 1
# Keeps a pile of near-duplicates from ending in one cell that no grouping can then balance.
_FINE_LARGEST_OVER_MEAN = 2.0
_CLUSTER_RESTARTS = 10
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Partition:
    """Fine centroids, the cluster of each, and how many samples of the data set each cluster holds."""

    fine_centroids: Float[Tensor, "f d"]
    cluster_of_fine: Int64[Tensor, "f"]
    counts: Int64[Tensor, "k"]

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.counts)

    @property
    def priors(self) -> Float[Tensor, "k"]:
        """Each cluster's share of the samples, float64."""
        return self.counts.double() / self.counts.sum()

    def assign(self, features: Float[Tensor, "n d"]) -> Int64[Tensor, "n"]:
        """The cluster of each sample, by its nearest fine centroid; features need not be normalised."""
        nearest = nearest_fine(features, self.fine_centroids)
        return self.cluster_of_fine[nearest]

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all; the same partition gives the same bytes."""
        tensors = {
            "fine_centroids": self.fine_centroids.contiguous(),
            "cluster_of_fine": self.cluster_of_fine.contiguous(),
            "counts": self.counts.contiguous(),
        }
        # One metadata key only: safetensors writes several in no fixed order.
        metadata = {"ddm_lightning": json.dumps({"kind": "partition", "format_version": FORMAT_VERSION})}
        atomic_write(path, lambda temporary: temporary.write_bytes(save(tensors, metadata)))

    @classmethod
    def load(cls, path: Path) -> Partition:
        """Read what ``save`` wrote.

        Raises:
            UserError: the file is missing, is no safetensors file, or no partition of this format.
        """
        remedy = "run prepare again"
        try:
            with safe_open(path, framework="pt") as stored:
                metadata = json.loads((stored.metadata() or {}).get("ddm_lightning", "{}"))
                if metadata.get("kind") != "partition" or metadata.get("format_version") != FORMAT_VERSION:
                    raise UserError(f"{path}: is no partition of format {FORMAT_VERSION}; {remedy}")
                return cls(*(stored.get_tensor(name) for name in ("fine_centroids", "cluster_of_fine", "counts")))
        except FileNotFoundError:
            raise UserError(f"{path}: the partition is missing; {remedy}") from None
        except (SafetensorError, ValueError, OSError) as error:
            raise UserError(f"{path}: the partition cannot be read ({error}); {remedy}") from None


def check_sizes(config: PartitionConfig, num_samples: int) -> None:
    """Refuse a partition that has more parts than there are samples.

    Raises:
        UserError: too many clusters or fine centroids, or too small a part to fit them on.
    """
    prefix = "prepare.partition"
    if config.num_clusters > num_samples:
        raise UserError(
            f"key '{prefix}.num_clusters' = {config.num_clusters}: the source has only {num_samples} samples; "
            "use fewer clusters or more samples"
        )
    if config.num_fine_centroids > num_samples:
        raise UserError(
            f"key '{prefix}.num_fine_centroids' = {config.num_fine_centroids}: "
            f"the source has only {num_samples} samples; use fewer fine centroids"
        )
    if config.num_fine_centroids > _num_fitted(config, num_samples):
        raise UserError(
            f"key '{prefix}.fit_fraction' = {config.fit_fraction}: leaves {_num_fitted(config, num_samples)} of "
            f"{num_samples} samples for {config.num_fine_centroids} fine centroids; raise it"
        )


def fit_partition(features: Float[Tensor, "n d"], config: PartitionConfig, seed: int) -> Partition:
    """Split the data set; the same features, config and seed give the same partition.

    Args:
        features: one row a sample, any scale; rows are L2-normalised. Read in blocks, so it may be a memory map.
        config: sizes, iterations and the limit of the largest cluster.
        seed: of the samples that are fitted and of the starting centroids.

    Raises:
        UserError: more parts than (distinct) samples, or a largest cluster over the configured limit.
    """
    num_samples = len(features)
    check_sizes(config, num_samples)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(num_samples, generator=generator)[: _num_fitted(config, num_samples)].sort().values
    try:
        fine, _ = balanced_kmeans(
            _normalise(features[rows]),
            config.num_fine_centroids,
            generator=generator,
            num_iterations=config.num_iterations,
            max_largest_over_mean=_FINE_LARGEST_OVER_MEAN,
        )
        nearest = nearest_fine(features, fine)
        per_fine = nearest.bincount(minlength=len(fine))
        _, cluster_of_fine = balanced_kmeans(
            fine.double(),
            config.num_clusters,
            generator=generator,
            weights=per_fine.double(),
            num_iterations=config.num_iterations,
            max_largest_over_mean=config.max_largest_over_mean,
            num_restarts=_CLUSTER_RESTARTS,
        )
    except ValueError as error:
        raise UserError(
            f"key 'prepare.partition.num_fine_centroids' = {config.num_fine_centroids}: {error}; "
            "use fewer, or remove duplicates from the source"
        ) from None
    cluster_of_fine = _largest_first(cluster_of_fine, per_fine, config.num_clusters)
    counts = torch.zeros(config.num_clusters, dtype=torch.int64).index_add_(0, cluster_of_fine, per_fine)
    _check_balance(counts, config)
    return Partition(fine, cluster_of_fine, counts)


def nearest_fine(features: Float[Tensor, "n d"], fine_centroids: Float[Tensor, "f d"]) -> Int64[Tensor, "n"]:
    """The nearest fine centroid of each L2-normalised row, a block of rows at a time."""
    nearest = [
        squared_distances(_normalise(block), fine_centroids).argmin(1) for block in features.split(_ROWS_AT_ONCE)
    ]
    return torch.cat(nearest)


def _num_fitted(config: PartitionConfig, num_samples: int) -> int:
    return max(1, round(config.fit_fraction * num_samples))


def _normalise(features: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    return torch.nn.functional.normalize(features.float(), dim=1)


def _largest_first(cluster_of_fine: Tensor, per_fine: Tensor, num_clusters: int) -> Tensor:
    """Number the clusters by size, so that their names do not hang on the order in which they were drawn."""
    counts = torch.zeros(num_clusters, dtype=torch.int64).index_add_(0, cluster_of_fine, per_fine)
    rank = torch.empty_like(counts)
    rank[counts.argsort(descending=True, stable=True)] = torch.arange(num_clusters)
    return rank[cluster_of_fine]


def _check_balance(counts: Int64[Tensor, "k"], config: PartitionConfig) -> None:
    total, largest = int(counts.sum()), int(counts.max())
    if int(counts.min()) == 0:
        raise UserError(
            f"key 'prepare.partition.num_clusters' = {config.num_clusters}: a cluster stays empty; "
            "use fewer clusters or raise prepare.partition.num_fine_centroids"
        )
    # Whole samples cannot be split more evenly than the mean rounded up.
    if largest > capacity(float(total), config.num_clusters, config.max_largest_over_mean):
        raise UserError(
            f"key 'prepare.partition.max_largest_over_mean' = {config.max_largest_over_mean}: the largest cluster has "
            f"{largest} samples, {largest / (total / config.num_clusters):.3f} times the mean; raise this key, "
            "or prepare.partition.num_fine_centroids for finer pieces"
        )
