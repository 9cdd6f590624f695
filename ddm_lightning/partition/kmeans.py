"""Balanced k-means in pure torch: every cluster has a price, and a crowded cluster raises its own.

Assigning weighted samples to clusters of limited capacity at minimum cost is a transport problem. Its dual
variables are prices: a sample takes the cluster with the least cost plus price, and at the right prices no cluster
exceeds its capacity. The auction below raises prices from zero, so that a cluster that never fills up stays free
(Bertsekas, "Auction algorithms for network flow problems", 1992, for unequal capacities).
"""

from __future__ import annotations

import math
from operator import itemgetter
from typing import TypeAlias

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

Points: TypeAlias = Float[Tensor, "n d"]
Centroids: TypeAlias = Float[Tensor, "k d"]
Weights: TypeAlias = Float[Tensor, "n"]
Costs: TypeAlias = Float[Tensor, "n k"]
"""Cost of each sample in each cluster."""
PerCluster: TypeAlias = Float[Tensor, "k"]
Assignment: TypeAlias = Int64[Tensor, "n"]
"""Cluster of each sample."""

# How much more than its best cluster a sample may cost at the end of the auction, in std of the costs.
_AUCTION_STEP = 3e-3
# Price rises per cluster before ``repair`` takes over; reached only if large weights cannot fit.
_RISES_PER_CLUSTER = 200


def balanced_kmeans(
    x: Points,
    num_clusters: int,
    generator: torch.Generator,
    num_iterations: int = 20,
    max_largest_over_mean: float = math.inf,
    weights: Weights | None = None,
    num_restarts: int = 1,
) -> tuple[Centroids, Assignment]:
    """Run k-means with clusters that weigh at most ``max_largest_over_mean`` times the mean.

    With unit weights the limit always holds. With unequal weights it may be out of reach; then moves and swaps of
    single samples come as near to it as they can. ``math.inf`` gives plain k-means.

    Args:
        x: samples; distances are Euclidean.
        num_clusters: K.
        generator: random numbers of the start; the same state gives the same result.
        num_iterations: maximum number of Lloyd iterations; ends earlier once no sample moves.
        max_largest_over_mean: largest cluster allowed, as a multiple of the mean weight.
        weights: weight of each sample, such as a count; None is 1 each.
        num_restarts: independent starts; the one with the least cost wins.

    Returns:
        Centroids (weighted means), and the cluster of each sample. Memory is proportional to n times K.

    Raises:
        ValueError: fewer distinct samples than clusters.
    """
    if weights is None:
        weights = x.new_ones(len(x))

    # Centred, because |x|² + |c|² - 2xc loses digits if the mean is large against the spread.
    mean = x.mean(0)
    x = x - mean
    limit = capacity(float(weights.sum()), num_clusters, max_largest_over_mean)
    starts = []
    for _ in range(num_restarts):
        centroids = plus_plus(x, num_clusters, weights, generator)
        assignment = torch.full((len(x),), -1)
        for _ in range(num_iterations):
            previous = assignment
            assignment = balanced_assignment(squared_distances(x, centroids), weights, limit)
            centroids = weighted_means(x, weights, assignment, centroids)
            if torch.equal(assignment, previous):
                break

        cost = float((weights * (x - centroids[assignment]).square().sum(1)).sum())
        # A start within the limit beats a cheaper one beyond it.
        if float(loads(assignment, weights, num_clusters).max()) > limit:
            cost = math.inf

        starts.append((cost, centroids, assignment))

    _, centroids, assignment = min(starts, key=itemgetter(0))
    return centroids + mean, assignment


def capacity(total: float, num_clusters: int, max_largest_over_mean: float) -> float:
    """Return the largest weight of one cluster: at least the mean, rounded up because samples are whole."""
    if math.isinf(max_largest_over_mean):
        return math.inf

    mean = total / num_clusters
    return float(max(math.floor(max_largest_over_mean * mean + 1e-9), math.ceil(mean - 1e-9)))


def squared_distances(x: Points, centroids: Centroids) -> Costs:
    """Return squared Euclidean distances, from one matrix product."""
    norms = x.square().sum(1, keepdim=True) + centroids.square().sum(1)
    return torch.addmm(norms, x, centroids.T, alpha=-2).clamp_(min=0)


def loads(assignment: Assignment, weights: Weights, num_clusters: int) -> PerCluster:
    """Return the total weight of each cluster."""
    return weights.new_zeros(num_clusters).index_add_(0, assignment, weights)


def balanced_assignment(cost: Costs, weights: Weights, limit: float) -> Assignment:
    """Return the cluster of each sample: least total cost, with a weight of at most ``limit`` in each cluster.

    Raises the price of the most crowded cluster until exactly its excess prefers to leave, and repeats. With unit
    weights, a sample's cost is within the auction's step (0.3 % of the costs' std) of the optimum. Deterministic.
    """
    assignment = cost.argmin(1)
    num_clusters = cost.shape[1]
    if math.isinf(limit) or num_clusters == 1:
        return assignment

    prices = cost.new_zeros(num_clusters)
    step = _AUCTION_STEP * float(cost.std())
    load = loads(assignment, weights, num_clusters)
    # Prices would push an excess below half a sample back and forth forever; a swap by ``repair`` ends it.
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
        num_leaving = int(torch.searchsorted(weights[members[order]].cumsum(0), excess)) + 1
        movers = order[:num_leaving]
        prices[crowded] += margin[num_leaving - 1] + step
        assignment[members[movers]] = target[movers]
        load = loads(assignment, weights, num_clusters)

    return repair(cost, weights, assignment, limit)


def balanced_prices(cost: Costs, limit: float) -> PerCluster:
    """Return prices at which no cluster is the cheapest (cost plus price) for more than ``limit`` samples.

    The auction of ``balanced_assignment`` for samples of weight 1, but at each rise every sample takes its cheapest
    cluster. So the prices alone say where a new sample belongs. Deterministic. Many equal samples, or a limit just
    above n / k, may leave a cluster above the limit.
    """
    num_clusters = cost.shape[1]
    prices = cost.new_zeros(num_clusters)
    # Smaller than the auction's, because all that lie within a step of a boundary move at once.
    step = 0.1 * _AUCTION_STEP * float(cost.std())
    for _ in range(_RISES_PER_CLUSTER * num_clusters):
        offers = cost + prices
        assignment = offers.argmin(1)
        load = assignment.bincount(minlength=num_clusters)
        crowded = int(load.argmax())
        excess = int(load[crowded]) - math.floor(limit)
        if excess <= 0:
            break

        members = offers[assignment == crowded]
        here = members[:, crowded].clone()
        members[:, crowded] = math.inf
        prices[crowded] += torch.kthvalue(members.amin(1) - here, excess).values + step

    return prices


def repair(cost: Costs, weights: Weights, assignment: Assignment, limit: float) -> Assignment:
    """Bring crowded clusters under the limit by the cheapest moves and swaps of single samples.

    If no change brings both of its clusters under the limit, make the cheapest one that lowers the larger of the two
    loads. Every change lowers the sum of squared loads, so the loop ends.
    """
    load = loads(assignment, weights, cost.shape[1])
    while float(load.max()) > limit:
        crowded = int(load.argmax())
        change = _cheapest_change(cost, weights, assignment, load, limit)
        if not change:
            change = _cheapest_change(cost, weights, assignment, load, float(load[crowded]) * (1 - 1e-6))
        if not change:
            break

        for sample, cluster in change:
            assignment[sample] = cluster

        load = loads(assignment, weights, cost.shape[1])

    return assignment


def _cheapest_change(
    cost: Costs, weights: Weights, assignment: Assignment, load: PerCluster, limit: float
) -> list[tuple[int, int]]:
    """Move a sample out of the most crowded cluster or, if none fits, exchange it for a lighter one; none if neither.

    Returns:
        Samples and their new clusters.
    """
    crowded = int(load.argmax())
    members = ((assignment == crowded) & (weights > 0)).nonzero().squeeze(1)
    heavy = weights[members].unsqueeze(1)
    # Cost per unit of weight, so that one heavy sample and many light ones compare fairly.
    more = cost[members] - cost[members, crowded].unsqueeze(1)
    price = more.masked_fill(load + heavy > limit, math.inf)
    price[:, crowded] = math.inf
    row, cluster = divmod(int(price.argmin()), len(load))
    if not math.isinf(float(price[row, cluster])):
        return [(int(members[row]), cluster)]

    others = (assignment != crowded).nonzero().squeeze(1)
    home = assignment[others]
    surplus = heavy - weights[others]
    price = heavy * more[:, home] + weights[others] * (cost[others, crowded] - cost[others, home])
    price[(surplus <= 0) | (load[home] + surplus > limit)] = math.inf
    if price.numel() == 0:
        return []

    row, column = divmod(int((price / surplus.clamp(min=1e-12)).argmin()), len(others))
    if math.isinf(float(price[row, column])):
        return []

    return [(int(members[row]), int(home[column])), (int(others[column]), crowded)]


def plus_plus(x: Points, num_clusters: int, weights: Weights, generator: torch.Generator) -> Centroids:
    """Choose starting centroids by k-means++ (Arthur and Vassilvitskii, 2007), weighted.

    Raises:
        ValueError: fewer distinct samples than clusters.
    """
    chosen: list[int] = []
    nearest = torch.full((len(x),), math.inf, dtype=x.dtype)
    gaps = torch.empty_like(x)
    odds = weights.double()
    for _ in range(num_clusters):
        # Not torch.multinomial, which accepts at most 2^24 samples.
        ladder = odds.cumsum(0)
        if float(ladder[-1]) <= 0:
            raise ValueError(f"only {len(chosen)} distinct samples for {num_clusters} clusters")

        dart = torch.rand((), generator=generator, dtype=torch.float64) * ladder[-1]
        index = int(torch.searchsorted(ladder, dart, right=True).clamp(max=len(x) - 1))
        chosen.append(index)
        nearest = torch.minimum(nearest, torch.sub(x, x[index], out=gaps).square_().sum(1))
        odds = weights.double() * nearest.double()

    return x[chosen]


def weighted_means(x: Points, weights: Weights, assignment: Assignment, old: Centroids) -> Centroids:
    """Return the weighted means of the clusters; an empty cluster keeps its ``old`` centroid."""
    sums = torch.zeros_like(old).index_add_(0, assignment, x * weights.unsqueeze(1))
    return means(sums, loads(assignment, weights, len(old)), old)


def means(sums: Centroids, totals: Shaped[Tensor, "k"], old: Centroids) -> Centroids:
    """Return ``sums`` over ``totals``; an empty cluster keeps its ``old`` centroid."""
    divisors = totals.to(sums.dtype).clamp(min=1e-12).unsqueeze(1)
    return torch.where(totals.unsqueeze(1) > 0, sums / divisors, old).to(old.dtype)
