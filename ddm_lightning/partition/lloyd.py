"""Plain k-means over features larger than memory: Lloyd's iterations, read block by block.

Distances are one matrix product a block, sums one gather, so that the product is nearly all of the time.
Started by k-means++ on a small sample. What balanced k-means does by prices is done roughly here: the
centroid of an empty or nearly empty cell is moved to split the most crowded one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ddm_lightning.partition.nearest import FeatureBlocks, in_order, not_finite, one_thread, rows_at_once
from ddm_lightning.partition.rows import Rows

# Rows a centroid of the sample that gives the starting centroids; the second where the first holds too many duplicates.
_START_ROWS = (8, 64)
# Draws of starting centroids: one at a time up to so many clusters, more at a time beyond.
_DRAWS = 64
# The last iterations only settle.
_SETTLING_ITERATIONS = 2
# A cell that is lighter than this, against the mean, may be given up to split a crowded one.
_GIVEN_UP = 0.5
# Two halves of a cell start this far apart, in root mean square radii: near enough to keep their samples.
_SPLIT = 0.1


@dataclass(frozen=True)
class Cells:
    """What one pass found of each cell: samples, their sum, and their summed squared distance from the centroid."""

    counts: Int64[Tensor, "k"]
    sums: Float[Tensor, "k d"]
    costs: Float[Tensor, "k"]


def lloyd_kmeans(
    rows: Rows,
    num_clusters: int,
    *,
    metric: str,
    generator: torch.Generator,
    num_iterations: int,
    chosen: Int64[np.ndarray, "m"] | None = None,
    device: str = "cpu",
    max_largest_over_mean: float = math.inf,
    tick: Callable[[], None] = lambda: None,
) -> Float[Tensor, "k d"]:
    """Centroids of the features by ``num_iterations`` passes over them; the same on every split into arrays.

    Args:
        rows: features, float16 or float32; memory maps stay on disk.
        num_clusters: centroids.
        metric: ``spherical`` (rows are made unit vectors; centroids are their means) or ``euclidean``.
        generator: draws the sample to start from, on the CPU.
        num_iterations: passes.
        chosen: ascending numbers of the rows to fit; None fits all.
        device: torch device that computes.
        max_largest_over_mean: cells beyond it are split while there are far lighter ones to give up;
            a wish, not a limit.
        tick: called after each pass.

    Returns:
        Centroids, float32, on the CPU.

    Raises:
        ValueError: fewer distinct rows, in the sample that it starts from, than clusters.
        UserError: features that are not finite.
    """
    blocks = FeatureBlocks(rows, metric, rows_at_once(num_clusters), device, chosen)
    centroids, centre = _start(blocks, num_clusters, generator)
    for iteration in range(num_iterations):
        cells = _pass(blocks, centroids, centre)
        centroids = _means(cells, centroids)
        if iteration < num_iterations - _SETTLING_ITERATIONS:
            centroids = _relocated(centroids, cells, max_largest_over_mean, generator)
        tick()
    return (centroids if centre is None else centroids + centre).cpu()


def _start(
    blocks: FeatureBlocks, num_clusters: int, generator: torch.Generator
) -> tuple[Float[Tensor, "k d"], Float[Tensor, "d"] | None]:
    """Starting centroids, and where they are centred if that is not the origin."""
    last = len(_START_ROWS) - 1
    for attempt, rows_a_centroid in enumerate(_START_ROWS):
        sample = blocks.sample(rows_a_centroid * num_clusters, generator)
        # Centred, because |x|² + |c|² - 2xc loses digits when the mean is large against the spread; the mean of
        # unit vectors is not.
        centre = sample.mean(0) if blocks.metric == "euclidean" else None
        try:
            with one_thread():
                start = plus_plus(sample if centre is None else sample - centre, num_clusters, generator)
            return start, centre
        except ValueError:
            if len(sample) == len(blocks) or attempt == last:
                raise
    raise AssertionError("the last attempt returns or raises")


def plus_plus(x: Float[Tensor, "n d"], num_clusters: int, generator: torch.Generator) -> Float[Tensor, "k d"]:
    """Starting centroids by k-means++ (Arthur and Vassilvitskii, 2007), some at a time.

    Those of one draw do not repel one another, except that no two are equal.

    Raises:
        ValueError: fewer distinct samples than clusters.
    """
    chosen = x[:0]
    norms = x.square().sum(1)
    nearest = torch.full_like(norms, math.inf)
    # Below this a float32 distance is rounding: such samples are taken for equal.
    noise = 8 * torch.finfo(x.dtype).eps * float(norms.max())
    while len(chosen) < num_clusters:
        first = len(chosen) == 0
        odds = torch.ones(len(x)) if first else torch.where(nearest > noise, nearest, 0).cpu()
        at_once = 1 if first else math.ceil(num_clusters / _DRAWS)
        wanted = min(at_once, num_clusters - len(chosen), int((odds > 0).sum()))
        if wanted == 0:
            raise ValueError(f"only {len(chosen)} distinct samples among {len(x)} drawn for {num_clusters} clusters")
        drawn = x[torch.multinomial(odds, wanted, generator=generator).to(x.device)]
        gaps = (drawn.unsqueeze(1) - drawn).square().sum(2) > noise
        drawn = drawn[(gaps | ~torch.ones_like(gaps).tril(-1)).all(1)]
        chosen = torch.cat([chosen, drawn])
        distances = norms.unsqueeze(1) + drawn.square().sum(1) - 2 * x @ drawn.T
        nearest = torch.minimum(nearest, distances.amin(1))
    return chosen


def _pass(blocks: FeatureBlocks, centroids: Float[Tensor, "k d"], centre: Float[Tensor, "d"] | None) -> Cells:
    """Assign every sample and add it up; the metric is Euclidean where there is a ``centre``, and else spherical.

    Raises:
        UserError: a sample that is not finite.
    """
    num_clusters, dim = centroids.shape
    half = centroids.square().sum(1) / 2
    own = threading.local()

    def of_block(start: int) -> tuple[Tensor, Tensor, Tensor]:
        if not hasattr(own, "rows"):
            # Kept, because fresh memory of this size costs about as much as filling it.
            own.rows = np.empty((min(blocks.num_rows, len(blocks)), dim), np.float32)
            own.scores = centroids.new_empty(len(own.rows), num_clusters)
        x = blocks.read(start, own.rows)
        x = x if centre is None else x.sub_(centre)
        squares = torch.linalg.vecdot(x, x)
        # Rows are not divided by their norms: the c nearest to x/|x| has the least |x||c|²/2 - xc. The bound is
        # normalize()'s.
        scale = squares.sqrt().clamp_(min=1e-12) if centre is None else torch.ones_like(squares)
        scores = torch.mul(scale.unsqueeze(1), half, out=own.scores[: len(x)]).addmm_(x, centroids.T, alpha=-1)
        least, index = scores.min(1)
        finite = torch.isfinite(least)
        if not bool(finite.all()):
            raise not_finite(blocks.number(start + int((~finite).nonzero()[0])))
        counts = index.bincount(minlength=num_clusters)
        order, starts = index.argsort(stable=True), counts.cumsum(0) - counts
        cost = squares.div_(scale).add_(least, alpha=2).div_(scale)
        sums = _sums(x, order, starts, scale.reciprocal()[order])
        return counts, sums, _sums(cost.unsqueeze(1), order, starts, torch.ones_like(cost)).squeeze(1)

    counts = torch.zeros(num_clusters, dtype=torch.int64, device=centroids.device)
    # Float64, because of the many blocks; within a block few samples meet in a cell.
    sums = torch.zeros_like(centroids, dtype=torch.float64)
    costs = sums.new_zeros(num_clusters)
    for block_counts, block_sums, block_costs in in_order(of_block, blocks.starts, blocks.device):
        counts += block_counts
        sums += block_sums
        costs += block_costs
    return Cells(counts, sums, costs)


def _sums(x: Tensor, order: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    # Not index_add_, which is slower here and adds in no fixed order on a GPU.
    return torch.nn.functional.embedding_bag(order, x, starts, mode="sum", per_sample_weights=weights)


def _means(cells: Cells, old: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
    """Centroids of the cells; an empty one keeps its old centroid."""
    means = cells.sums / cells.counts.clamp(min=1).unsqueeze(1)
    return torch.where(cells.counts.unsqueeze(1) > 0, means, old).to(old.dtype)


def _relocated(
    centroids: Float[Tensor, "k d"], cells: Cells, max_largest_over_mean: float, generator: torch.Generator
) -> Float[Tensor, "k d"]:
    """Move centroids of empty cells, then of the lightest, into crowded cells, which they split in halves."""
    load = cells.counts.double().cpu()
    # Summed in float32, the cost of a cell of equal samples may come out below zero.
    radius = (cells.costs.clamp(min=0) / cells.counts.clamp(min=1)).sqrt().cpu()
    moved = centroids.clone()
    mean = float(load.mean())
    for light in load.argsort(stable=True).tolist():
        heavy = int(load.argmax())
        empty = float(cells.counts[light]) == 0
        crowded = float(load[heavy]) > max_largest_over_mean * mean
        if not empty and not (crowded and float(cells.counts[light]) < _GIVEN_UP * mean):
            break
        offset = torch.randn(centroids.shape[1], generator=generator) * (_SPLIT * radius[heavy])
        offset = (offset / centroids.shape[1] ** 0.5).to(moved)
        moved[light] = moved[heavy] + offset
        moved[heavy] -= offset
        load[heavy] = load[light] = load[heavy] / 2
        radius[light] = radius[heavy]
    return moved
