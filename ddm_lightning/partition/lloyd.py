"""Plain k-means over features larger than memory: Lloyd's iterations, read block by block.

Distances are one matrix product per block and sums one gather, so that the product takes nearly all of the time.
k-means++ on a small sample gives the start. Balance is rough: the centroid of an empty or nearly empty cell moves to
split the most crowded cell.
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

from ddm_lightning.partition.nearest import in_order, not_finite, one_thread, rows_at_once, take_finite
from ddm_lightning.partition.rows import Rows

# Sampled rows per starting centroid; the second if the first sample has too many duplicates.
_START_ROWS = (8, 64)
# Starting centroids are drawn one at a time up to this many, in this many batches beyond.
_DRAWS = 64
# The last iterations move no centroid to another cell.
_SETTLING_ITERATIONS = 2
# A cell below this share of the mean size may be given up to split a crowded one.
_GIVEN_UP = 0.5
# The halves of a split cell start this far apart, in root mean square radii: near enough to keep their samples.
_SPLIT = 0.1
# Scattered rows, slow to read in every pass, are kept in memory up to this size.
_KEPT_BYTES = 1 << 30


class FeatureBlocks:
    """Some or all rows of features in blocks that do not depend on how the rows are split into arrays.

    Memory is bounded: up to 1 GiB of scattered rows are read once and kept; larger ones are read again in each pass.

    Args:
        rows: features, float16 or float32.
        metric: ``spherical`` or ``euclidean``.
        num_rows: rows of a block.
        device: torch device of the blocks.
        chosen: ascending numbers of the rows to take; None takes all.
    """

    def __init__(
        self, rows: Rows, metric: str, num_rows: int, device: str = "cpu", chosen: Int64[np.ndarray, "m"] | None = None
    ) -> None:
        self.rows, self.metric, self.num_rows, self.device, self.chosen = rows, metric, num_rows, device, chosen
        self._kept: np.ndarray | None = None
        if chosen is not None and len(chosen) * rows.row_bytes <= _KEPT_BYTES:
            self._kept = rows.take(chosen)

    def __len__(self) -> int:
        return len(self.rows) if self.chosen is None else len(self.chosen)

    @property
    def starts(self) -> range:
        """Positions at which the blocks begin."""
        return range(0, len(self), self.num_rows)

    def read(self, start: int, buffer: Float[np.ndarray, "r d"]) -> Float[Tensor, "m d"]:
        """The block at ``start``, not normalised; on the CPU it shares the memory of ``buffer``."""
        block = buffer[: min(self.num_rows, len(self) - start)]
        stop = start + len(block)
        if self._kept is not None:
            block[:] = self._kept[start:stop]
        elif self.chosen is None:
            self.rows.read_into(block, start)
        else:
            block[:] = self.rows.take(self.chosen[start:stop])
        return torch.from_numpy(block).to(self.device)

    def sample(self, size: int, generator: torch.Generator) -> Float[Tensor, "m d"]:
        """At most ``size`` different random rows, prepared for comparison.

        Raises:
            UserError: a row is not finite.
        """
        positions = torch.randperm(len(self), generator=generator)[:size].numpy()
        numbers = positions if self.chosen is None else self.chosen[positions]
        return take_finite(self.rows, numbers, self.metric, self.device)

    def number(self, position: int) -> int:
        """Number of the row at ``position`` among all rows."""
        return position if self.chosen is None else int(self.chosen[position])


@dataclass(frozen=True)
class Cells:
    """Result of one pass, per cell: number of samples, their sum, total squared distance from the centroid."""

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
    """k-means centroids from ``num_iterations`` passes over the features; the same for any split into arrays.

    Args:
        rows: features, float16 or float32; memory maps stay on disk.
        num_clusters: centroids.
        metric: ``spherical`` (centroids are means of unit vectors) or ``euclidean``.
        generator: CPU generator of all random numbers.
        num_iterations: passes.
        chosen: ascending numbers of the rows to fit; None fits all.
        device: torch device that computes.
        max_largest_over_mean: larger cells are split while far smaller ones can be given up; a goal, not a limit.
        tick: called after each pass.

    Returns:
        Centroids, float32, on the CPU.

    Raises:
        ValueError: fewer distinct rows in the starting sample than clusters.
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
    """Starting centroids relative to a centre, and that centre; None is the origin."""
    last = len(_START_ROWS) - 1
    for attempt, rows_a_centroid in enumerate(_START_ROWS):
        sample = blocks.sample(rows_a_centroid * num_clusters, generator)
        # Centred, because |x|² + |c|² - 2xc loses digits if the mean is large against the spread. The mean of unit
        # vectors never is.
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
    """Starting centroids by k-means++ (Arthur and Vassilvitskii, 2007), in batches.

    Centroids of one batch do not repel one another, but no two are equal.

    Raises:
        ValueError: fewer distinct samples than clusters.
    """
    chosen = x[:0]
    norms = x.square().sum(1)
    nearest = torch.full_like(norms, math.inf)
    # Smaller float32 distances are rounding errors: such samples count as equal.
    noise = 8 * torch.finfo(x.dtype).eps * float(norms.max())
    while len(chosen) < num_clusters:
        first = len(chosen) == 0
        odds = torch.ones(len(x)) if first else torch.where(nearest > noise, nearest, 0).cpu()
        at_once = 1 if first else math.ceil(num_clusters / _DRAWS)
        wanted = min(at_once, num_clusters - len(chosen), int((odds > 0).sum()))
        if wanted == 0:
            raise ValueError(f"only {len(chosen)} distinct samples among {len(x)} for {num_clusters} clusters")
        drawn = x[torch.multinomial(odds, wanted, generator=generator).to(x.device)]
        gaps = (drawn.unsqueeze(1) - drawn).square().sum(2) > noise
        drawn = drawn[(gaps | ~torch.ones_like(gaps).tril(-1)).all(1)]
        chosen = torch.cat([chosen, drawn])
        distances = norms.unsqueeze(1) + drawn.square().sum(1) - 2 * x @ drawn.T
        nearest = torch.minimum(nearest, distances.amin(1))
    return chosen


def _pass(blocks: FeatureBlocks, centroids: Float[Tensor, "k d"], centre: Float[Tensor, "d"] | None) -> Cells:
    """Assign every sample and sum each cell. With a ``centre`` the metric is Euclidean, otherwise spherical.

    Raises:
        UserError: a sample that is not finite.
    """
    num_clusters, dim = centroids.shape
    half = centroids.square().sum(1) / 2
    own = threading.local()

    def of_block(start: int) -> tuple[Tensor, Tensor, Tensor]:
        if not hasattr(own, "rows"):
            # One buffer per thread: fresh memory of this size costs about as much as filling it.
            own.rows = np.empty((min(blocks.num_rows, len(blocks)), dim), np.float32)
            own.scores = centroids.new_empty(len(own.rows), num_clusters)
        x = blocks.read(start, own.rows)
        x = x if centre is None else x.sub_(centre)
        squares = torch.linalg.vecdot(x, x)
        # Rows need no division by their norms: the c nearest to x/|x| has the least |x||c|²/2 - xc. The minimum is
        # that of normalize().
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
    # Float64, because there are many blocks; within a block few samples meet in a cell.
    sums = torch.zeros_like(centroids, dtype=torch.float64)
    costs = sums.new_zeros(num_clusters)
    for block_counts, block_sums, block_costs in in_order(of_block, blocks.starts, blocks.device):
        counts += block_counts
        sums += block_sums
        costs += block_costs
    return Cells(counts, sums, costs)


def _sums(x: Tensor, order: Tensor, starts: Tensor, weights: Tensor) -> Tensor:
    # Not index_add_: it is slower here, and on a GPU it adds in no fixed order.
    return torch.nn.functional.embedding_bag(order, x, starts, mode="sum", per_sample_weights=weights)


def _means(cells: Cells, old: Float[Tensor, "k d"]) -> Float[Tensor, "k d"]:
    """Means of the cells; an empty cell keeps its old centroid."""
    means = cells.sums / cells.counts.clamp(min=1).unsqueeze(1)
    return torch.where(cells.counts.unsqueeze(1) > 0, means, old).to(old.dtype)


def _relocated(
    centroids: Float[Tensor, "k d"], cells: Cells, max_largest_over_mean: float, generator: torch.Generator
) -> Float[Tensor, "k d"]:
    """Split crowded cells in halves, with the centroids of empty cells, then of the lightest."""
    load = cells.counts.double().cpu()
    # Rounding may make the cost of a cell of equal samples negative.
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
