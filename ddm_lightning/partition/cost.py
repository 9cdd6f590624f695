"""How long a partition takes and what it reads, by a model with two constants."""

from __future__ import annotations

from typing import NamedTuple


class PartitionCost(NamedTuple):
    """Of two-stage k-means with the assignment of all samples."""

    seconds: float
    flops: float
    """Floating-point operations, a multiply-add is two."""
    bytes: int
    """Read from the disk, in all passes."""


def partition_cost(
    num_samples: int,
    dim: int,
    num_fine: int,
    iterations: int,
    gflops: float,
    disk_gb_per_s: float,
    *,
    fit_fraction: float = 1.0,
    bytes_per_number: int = 4,
) -> PartitionCost:
    """Time and bytes of ``iterations`` passes over the fitted samples, and one over all, to assign.

    A pass costs one product of samples and fine centroids, 2 n d F floating-point operations, plus reading its
    features; the two take turns. The second stage and the start hang on F alone and are left out.

    Args:
        num_samples: n.
        dim: numbers of a sample's features, d.
        num_fine: fine centroids, F.
        iterations: of the fine stage.
        gflops: 10^9 operations a second that a pass reaches, all its work counted in; ``benchmarks/partition.py``
            measures it as ``gflops``.
        disk_gb_per_s: 10^9 bytes a second at which features are read.
        fit_fraction: part of the samples that is fitted.
        bytes_per_number: 4 for float32, as features are stored.
    """
    sample_passes = num_samples * (iterations * fit_fraction + 1)
    num_bytes = round(sample_passes * dim * bytes_per_number)
    flops = 2 * sample_passes * dim * num_fine
    return PartitionCost(flops / (gflops * 1e9) + num_bytes / (disk_gb_per_s * 1e9), flops, num_bytes)
