"""Balanced k-means in plain torch: every cluster has a price, and a crowded cluster raises its own.

Assigning weighted samples to clusters of limited capacity at least total cost is a transport problem.
Its dual variables are prices: a sample takes the cluster of least cost plus price, and at the right
prices no cluster is over capacity. The auction below finds them from below, starting at zero, so that
a cluster that never filled up costs nothing (Bertsekas, "Auction algorithms for network flow problems",
1992, for unequal capacities).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# Relative to the spread of the costs: how far from its best cluster the auction may leave a sample.
_AUCTION_STEP = 3e-3
# Price rises per cluster before the rest is left to repair; met only when large weights cannot fit.
_RISES_PER_CLUSTER = 200


def balanced_kmeans(
    x: Float[Tensor, "n d"],
    num_clusters: int,
    *,
    generator: torch.Generator,
    weights: Float[Tensor, "n"] | None = None,
    num_iterations: int = 20,
    max_largest_over_mean: float = math.inf,
    num_restarts: int = 1,
) -> tuple[Float[Tensor, "k d"], Int64[Tensor, "n"]]:
    """k-means whose largest cluster weighs at most ``max_largest_over_mean`` times the mean.

    The limit holds for unit weights; with unequal weights it can be out of reach, and the assignment
    is then as near to it as moves and swaps of single samples bring it. ``math.inf`` gives plain k-means.

    Args:
        x: samples; distances are Euclidean.
        num_clusters: clusters.
        generator: draws the starting centroids; the same state gives the same result.
        weights: of the samples, such as counts; None is 1 each.
        num_iterations: Lloyd iterations at most; ends when no sample moves.
        max_largest_over_mean: largest cluster allowed, as a multiple of the mean weight.
        num_restarts: independent starts, of which the one of least cost is kept.

    Returns:
        Centroids (weighted means) and the cluster of each sample. Memory grows with n times num_clusters.

    Raises:
        ValueError: fewer distinct samples than clusters.
    """
    weights = x.new_ones(len(x)) if weights is None else weights.to(x)
    # Centred, because |x|² + |c|² - 2xc loses digits when the mean is large against the spread.
    mean = x.mean(0)
    x = x - mean
    limit = capacity(float(weights.sum()), num_clusters, max_largest_over_mean)
    best: tuple[float, Tensor, Tensor] | None = None
    for _ in range(num_restarts):
        centroids = _plus_plus(x, num_clusters, weights, generator)
        assignment = torch.full((len(x),), -1)
        for _ in range(num_iterations):
            previous = assignment
            assignment = balanced_assignment(squared_distances(x, centroids), weights, limit)
            centroids = _weighted_means(x, weights, assignment, centroids)
            if torch.equal(assignment, previous):
                break
        cost = float((weights * (x - centroids[assignment]).square().sum(1)).sum())
        # A start that respects the limit wins over a cheaper one that does not.
        cost += math.inf if float(loads(assignment, weights, num_clusters).max()) > limit else 0.0
        if best is None or cost < best[0]:
            best = (cost, centroids, assignment)
    assert best is not None
    return best[1] + mean, best[2]


def capacity(total: float, num_clusters: int, max_largest_over_mean: float) -> float:
    """The weight that one cluster may hold; never under the mean rounded up, which whole samples need."""
    if math.isinf(max_largest_over_mean):
        return math.inf
    mean = total / num_clusters
    return float(max(math.floor(max_largest_over_mean * mean + 1e-9), math.ceil(mean - 1e-9)))


def squared_distances(x: Float[Tensor, "n d"], centroids: Float[Tensor, "k d"]) -> Float[Tensor, "n k"]:
    """Squared Euclidean distances by one matrix product."""
    norms = x.square().sum(1, keepdim=True) + centroids.square().sum(1)
    return torch.addmm(norms, x, centroids.T, alpha=-2).clamp_(min=0)


def loads(assignment: Int64[Tensor, "n"], weights: Float[Tensor, "n"], num_clusters: int) -> Float[Tensor, "k"]:
    """The weight in each cluster."""
    return weights.new_zeros(num_clusters).index_add_(0, assignment, weights)


def balanced_assignment(cost: Float[Tensor, "n k"], weights: Float[Tensor, "n"], limit: float) -> Int64[Tensor, "n"]:
    """The cluster of each sample: least total cost with at most ``limit`` weight in a cluster.

    Optimal for unit weights up to the auction's step (0.3 % of the costs' spread, a sample). Deterministic.
    """
    assignment = cost.argmin(1)
    num_clusters = cost.shape[1]
    if math.isinf(limit) or num_clusters == 1:
        return assignment
    assignment = _auction(cost, weights, assignment, limit)
    return repair(cost, weights, assignment, limit)


def _auction(
    cost: Float[Tensor, "n k"], weights: Float[Tensor, "n"], assignment: Int64[Tensor, "n"], limit: float
) -> Int64[Tensor, "n"]:
    """Raise the price of the most crowded cluster until just the excess prefers to leave, and repeat."""
    num_clusters = cost.shape[1]
    prices = cost.new_zeros(num_clusters)
    step = _AUCTION_STEP * float(cost.std())
    load = loads(assignment, weights, num_clusters)
    # What is less than half a sample prices push to and fro without end; a swap mends it at once.
    least_excess = float(weights.mean()) / 2
    for _ in range(_RISES_PER_CLUSTER * num_clusters):
        crowded = int(load.argmax())
        excess = float(load[crowded]) - limit
        if excess < least_excess:
            break
        members = (assignment == crowded).nonzero().squeeze(1)
        offers = cost[members] + prices
        here = offers[:, crowded].clone()
        offers[:, crowded] = math.inf
        there, target = offers.min(1)
        margin, order = torch.sort(there - here, stable=True)
        leaving = weights[members[order]]
        num_leaving = int(torch.searchsorted(leaving.cumsum(0), excess)) + 1
        movers = order[:num_leaving]
        prices[crowded] += margin[num_leaving - 1] + step
        assignment[members[movers]] = target[movers]
        load = loads(assignment, weights, num_clusters)
    return assignment


def repair(
    cost: Float[Tensor, "n k"], weights: Float[Tensor, "n"], assignment: Int64[Tensor, "n"], limit: float
) -> Int64[Tensor, "n"]:
    """Bring crowded clusters under the limit by the cheapest moves and swaps of single samples.

    Where none gets a pair of clusters under the limit, one that at least lowers the greater of the two
    will do. Every change lowers the sum of squared loads, so that this ends.
    """
    num_clusters = cost.shape[1]
    load = loads(assignment, weights, num_clusters)
    while float(load.max()) > limit:
        crowded = int(load.argmax())
        for bound in (limit, float(load[crowded]) * (1 - 1e-6)):
            change = _cheapest_move(cost, weights, assignment, load, crowded, bound)
            change = change or _cheapest_swap(cost, weights, assignment, load, crowded, bound)
            if change:
                break
        else:
            break
        for sample, cluster in change:
            assignment[sample] = cluster
        load = loads(assignment, weights, num_clusters)
    return assignment


def _cheapest_move(
    cost: Tensor, weights: Tensor, assignment: Tensor, load: Tensor, crowded: int, limit: float
) -> list[tuple[int, int]] | None:
    members = ((assignment == crowded) & (weights > 0)).nonzero().squeeze(1)
    # Per unit of weight, so that one heavy sample and many light ones compare fairly.
    price = cost[members] - cost[members, crowded].unsqueeze(1)
    price[load + weights[members].unsqueeze(1) > limit] = math.inf
    price[:, crowded] = math.inf
    flat = int(price.argmin())
    if math.isinf(float(price.flatten()[flat])):
        return None
    return [(int(members[flat // len(load)]), flat % len(load))]


def _cheapest_swap(
    cost: Tensor, weights: Tensor, assignment: Tensor, load: Tensor, crowded: int, limit: float
) -> list[tuple[int, int]] | None:
    """Exchange a heavy sample of ``crowded`` for a lighter one of another cluster that has the room."""
    members = (assignment == crowded).nonzero().squeeze(1)
    others = (assignment != crowded).nonzero().squeeze(1)
    home = assignment[others]
    surplus = weights[members].unsqueeze(1) - weights[others]
    price = weights[members].unsqueeze(1) * (cost[members][:, home] - cost[members, crowded].unsqueeze(1))
    price = price + weights[others] * (cost[others, crowded] - cost[others, home])
    price[(surplus <= 0) | (load[home] + surplus > limit)] = math.inf
    if price.numel() == 0:
        return None
    flat = int((price / surplus.clamp(min=1e-12)).argmin())
    row, column = flat // len(others), flat % len(others)
    if math.isinf(float(price[row, column])):
        return None
    return [(int(members[row]), int(home[column])), (int(others[column]), crowded)]


def _plus_plus(
    x: Float[Tensor, "n d"], num_clusters: int, weights: Float[Tensor, "n"], generator: torch.Generator
) -> Float[Tensor, "k d"]:
    """Starting centroids by k-means++ (Arthur and Vassilvitskii, 2007), weighted."""
    chosen: list[int] = []
    nearest = torch.full((len(x),), math.inf, dtype=x.dtype)
    odds = weights.double()
    for _ in range(num_clusters):
        # Not torch.multinomial, which refuses more than 2^24 samples.
        ladder = odds.cumsum(0)
        if float(ladder[-1]) <= 0:
            raise ValueError(f"only {len(chosen)} distinct samples for {num_clusters} clusters")
        dart = torch.rand((), generator=generator, dtype=torch.float64) * ladder[-1]
        index = int(torch.searchsorted(ladder, dart, right=True).clamp(max=len(x) - 1))
        chosen.append(index)
        nearest = torch.minimum(nearest, (x - x[index]).square().sum(1))
        odds = weights.double() * nearest.double()
    return x[chosen]


def _weighted_means(
    x: Float[Tensor, "n d"], weights: Float[Tensor, "n"], assignment: Int64[Tensor, "n"], old: Float[Tensor, "k d"]
) -> Float[Tensor, "k d"]:
    """Centroids of the clusters; an empty cluster keeps its old one."""
    total = loads(assignment, weights, len(old))
    sums = torch.zeros_like(old).index_add_(0, assignment, x * weights.unsqueeze(1))
    return torch.where(total.unsqueeze(1) > 0, sums / total.clamp(min=1e-12).unsqueeze(1), old)
