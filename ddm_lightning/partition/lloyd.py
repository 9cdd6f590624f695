"""Plain k-means over features larger than memory: Lloyd's iterations, read block by block.

Each block takes one matrix product for the distances and one gather for the sums; the product takes most of the time.
k-means++ on a small sample gives the start. Balance is rough: the centroid of an empty or nearly empty cell moves to
split the most crowded cell.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddm_lightning.config.experiment import PartitionConfig
from ddm_lightning.partition.columns import Rows
from ddm_lightning.partition.kmeans import Centroids, PerCluster, means, plus_plus
from ddm_lightning.partition.nearest import OnProgress, in_order, one_thread, prepared, rows_at_once

# Rows from which the starting centroids are drawn: per centroid, and at least.
_ROWS_PER_CENTROID = 8
_LEAST_START_ROWS = 8192
# Cells above this multiple of the mean are split while far smaller ones can be given up. Otherwise a pile of
# near-duplicates could fill one cell that no grouping can balance.
LARGEST_OVER_MEAN = 2.0
# The last iterations move no centroid to another cell.
_SETTLING_ITERATIONS = 2
# A cell below this share of the mean size may be given up to split a crowded one.
_GIVEN_UP = 0.5
# The halves of a split cell start this far apart, in root mean square radii: near enough to keep their samples.
_SPLIT = 0.1


def lloyd_kmeans(rows: Rows, config: PartitionConfig, generator: torch.Generator, on_progress: OnProgress) -> Centroids:
    """Run k-means to ``num_fine_centroids``; the result is the same for any split of the rows into arrays.

    Args:
        rows: features, float16 or float32, finite.
        config: number of centroids, metric (with ``spherical``, centroids are means of unit vectors), passes, and the
            torch device that computes.
        generator: CPU generator of all random numbers.
        on_progress: called after each pass, of which its caller makes one more.

    Returns:
        Centroids, float32, on the CPU.

    Raises:
        ValueError: fewer distinct rows in the starting sample than centroids.
    """
    centroids, centre = _start(rows, config, generator)
    for iteration in range(config.num_iterations):
        counts, sums, costs = _pass(rows, centroids, centre, config)
        centroids = means(sums, counts, centroids)
        if iteration < config.num_iterations - _SETTLING_ITERATIONS:
            centroids = _relocated(centroids, counts, costs, generator)

        on_progress((iteration + 1) * len(rows), (config.num_iterations + 1) * len(rows))

    return (centroids + centre).cpu()


def _start(rows: Rows, config: PartitionConfig, generator: torch.Generator) -> tuple[Centroids, Float[Tensor, "d"]]:
    """Return starting centroids relative to a centre, and that centre."""
    num_clusters = config.num_fine_centroids
    num_rows = max(_ROWS_PER_CENTROID * num_clusters, _LEAST_START_ROWS)
    numbers = torch.randperm(len(rows), generator=generator)[:num_rows]
    sample = prepared(rows.take(numbers.numpy()), config.metric)
    # Centred, because |x|² + |c|² - 2xc loses digits if the mean is large against the spread.
    centre = sample.mean(0)
    with one_thread():
        start = plus_plus(sample - centre, num_clusters, sample.new_ones(len(sample)), generator)

    return start.to(config.device), centre.to(config.device)


def _pass(
    rows: Rows, centroids: Centroids, centre: Float[Tensor, "d"], config: PartitionConfig
) -> tuple[Int64[Tensor, "k"], Centroids, PerCluster]:
    """Assign every sample.

    Returns:
        Per cell: number of samples, their sum relative to the centre, and their total squared distance from the
        centroid.
    """
    num_clusters = len(centroids)
    num_rows = rows_at_once(num_clusters)
    half = centroids.square().sum(1) / 2

    def of_block(start: int) -> tuple[Tensor, Tensor, Tensor]:
        x = prepared(rows[start : start + num_rows], config.metric, config.device) - centre
        least, index = torch.addmm(half, x, centroids.T, alpha=-1).min(1)
        counts = index.bincount(minlength=num_clusters)
        order = index.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        cost = x.square().sum(1) + 2 * least
        return counts, _sums(x, order, starts), _sums(cost.unsqueeze(1), order, starts).squeeze(1)

    counts = torch.zeros(num_clusters, dtype=torch.int64, device=centroids.device)
    # Float64, because there are many blocks; within a block few samples meet in a cell.
    sums = torch.zeros_like(centroids, dtype=torch.float64)
    costs = sums.new_zeros(num_clusters)
    for block_counts, block_sums, block_costs in in_order(of_block, range(0, len(rows), num_rows), config.device):
        counts += block_counts
        sums += block_sums
        costs += block_costs

    return counts, sums, costs


def _sums(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    # Not index_add_: it is slower here, and on a GPU it adds in no fixed order.
    return torch.nn.functional.embedding_bag(order, x, starts, mode="sum")


def _relocated(
    centroids: Centroids, counts: Int64[Tensor, "k"], costs: PerCluster, generator: torch.Generator
) -> Centroids:
    """Split crowded cells in halves, with the centroids of empty cells, then of the lightest."""
    load = counts.double().cpu()
    # Rounding may make the cost of a cell of equal samples negative.
    radius = (costs.clamp(min=0) / counts.clamp(min=1)).sqrt().cpu()
    moved = centroids.clone()
    mean = float(load.mean())
    for light in load.argsort(stable=True).tolist():
        heavy = int(load.argmax())
        size = float(counts[light])
        crowded = float(load[heavy]) > LARGEST_OVER_MEAN * mean
        if size > 0 and not (crowded and size < _GIVEN_UP * mean):
            break

        offset = torch.randn(centroids.shape[1], generator=generator) * (_SPLIT * radius[heavy])
        offset = (offset / centroids.shape[1] ** 0.5).to(moved)
        moved[light] = moved[heavy] + offset
        moved[heavy] -= offset
        load[heavy] = load[light] = load[heavy] / 2
        radius[light] = radius[heavy]

    return moved
