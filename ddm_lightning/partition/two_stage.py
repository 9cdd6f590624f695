"""Balanced k-means of a data set in two stages.

As in MoDE (arXiv 2404.16030), whose code the DDM paper (arXiv 2501.05450) used: k-means of a part of the samples
to fine centroids, then balanced k-means of the fine centroids to K clusters. The second stage weighs a fine
centroid by the samples that it holds, because what has to be balanced is samples, not centroids.

Small data sets have their fine cells balanced by prices too, which needs all distances in memory; large ones
have them found by plain k-means that splits crowded cells.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddm_lightning.config import PartitionConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.partition.kmeans import balanced_kmeans
from ddm_lightning.partition.lloyd import lloyd_kmeans
from ddm_lightning.partition.nearest import not_finite, one_thread, prepared
from ddm_lightning.partition.rows import Rows
from ddm_lightning.partition.rules import NearestCentroid, largest_first

# Keeps a pile of near-duplicates from ending in one cell that no grouping can then balance.
_FINE_LARGEST_OVER_MEAN = 2.0
_CLUSTER_RESTARTS = 10
# Up to so many distances, and so many numbers of features, prices are found: in seconds, on the CPU.
_PRICED_DISTANCES, _PRICED_NUMBERS = 1 << 22, 1 << 26


def num_fitted(config: PartitionConfig, num_samples: int) -> int:
    """Samples on which the fine centroids are fitted."""
    return max(1, round(config.fit_fraction * num_samples))


def fit_fine(
    rows: Rows, config: PartitionConfig, generator: torch.Generator, tick: Callable[[], None] = lambda: None
) -> Float[Tensor, "f d"]:
    """The fine centroids, on the CPU; ``tick`` is called after each pass over large data.

    Raises:
        UserError: more of them than distinct samples, or features that are not finite.
    """
    num_fine, size = config.num_fine_centroids, num_fitted(config, len(rows))
    try:
        if size * num_fine <= _PRICED_DISTANCES and size * rows.row_shape[0] <= _PRICED_NUMBERS:
            numbers = torch.randperm(len(rows), generator=generator)[:size].sort().values
            x = prepared(rows.take(numbers.numpy()), config.metric)
            fine = torch.isfinite(x).all(1)
            if not bool(fine.all()):
                raise not_finite(int(numbers[~fine][0]))
            with one_thread():
                centroids, _ = balanced_kmeans(
                    x,
                    num_fine,
                    generator=generator,
                    num_iterations=config.num_iterations,
                    max_largest_over_mean=_FINE_LARGEST_OVER_MEAN,
                )
            return centroids
        return lloyd_kmeans(
            rows,
            num_fine,
            metric=config.metric,
            generator=generator,
            num_iterations=config.num_iterations,
            chosen=_chosen(len(rows), size, generator),
            device=config.device,
            max_largest_over_mean=_FINE_LARGEST_OVER_MEAN,
            tick=tick,
        )
    except ValueError as error:
        raise UserError(
            f"key 'prepare.partition.num_fine_centroids' = {num_fine}: {error}; "
            "use fewer, or remove duplicates from the source"
        ) from None


def group_fine(
    fine: Float[Tensor, "f d"],
    per_fine: Int64[Tensor, "f"],
    config: PartitionConfig,
    generator: torch.Generator,
    features: str = "",
) -> NearestCentroid:
    """Group fine centroids to K clusters that balance ``per_fine``, their samples; ``features`` is what made them.

    Raises:
        UserError: fewer distinct centroids than clusters.
    """
    try:
        with one_thread():
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
            f"key 'prepare.partition.num_clusters' = {config.num_clusters}: {error}; "
            "use fewer, or remove duplicates from the source"
        ) from None
    cluster_of_fine = largest_first(cluster_of_fine, per_fine, config.num_clusters)
    weights = per_fine.double()
    sums = torch.zeros(config.num_clusters, fine.shape[1], dtype=torch.float64)
    sums.index_add_(0, cluster_of_fine, fine.double() * weights.unsqueeze(1))
    total = weights.new_zeros(config.num_clusters).index_add_(0, cluster_of_fine, weights)
    means = (sums / total.clamp(min=1).unsqueeze(1)).float()
    return NearestCentroid(fine, cluster_of_fine, means, config.metric, features)


def _chosen(num_samples: int, size: int, generator: torch.Generator) -> Int64[np.ndarray, "m"] | None:
    if size == num_samples:
        return None
    return torch.randperm(num_samples, generator=generator)[:size].sort().values.numpy()
