import math

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from sklearn.cluster import KMeans

from ddm_lightning.partition.kmeans import (
    balanced_assignment,
    balanced_kmeans,
    balanced_prices,
    capacity,
    loads,
    squared_distances,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def cloud(num, dims, seed):
    """Half of the points lie close together, so that the nearest cluster alone balances nothing."""
    x = torch.randn(num, dims, generator=generator(seed), dtype=torch.float64)
    x[: num // 2] *= 0.1
    return x


def inertia(x, centroids, assignment):
    return float((x - centroids[assignment]).square().sum())


@pytest.mark.parametrize(("num", "num_clusters", "seed"), [(40, 4, 0), (200, 20, 2), (24, 24, 3)])
def test_equal_clusters_cost_as_much_as_by_the_hungarian_method(num, num_clusters, seed):
    x = cloud(num, 3, seed)
    centroids = 0.5 * torch.randn(num_clusters, 3, generator=generator(seed + 100), dtype=torch.float64)
    cost = squared_distances(x, centroids)
    size = num // num_clusters
    assignment = balanced_assignment(cost, torch.ones(num, dtype=torch.float64), size)
    assert assignment.bincount(minlength=num_clusters).tolist() == [size] * num_clusters
    paid = float(cost[torch.arange(num), assignment].sum())
    # Each cluster is `size` seats in the oracle's problem.
    seats = cost.repeat_interleave(size, 1).numpy()
    best = seats[linear_sum_assignment(seats)].sum()
    nearest = float(cost.min(1).values.sum())
    assert best * (1 - 1e-9) <= paid <= 1.005 * best
    assert nearest < 0.99 * best, "the limit has to bind, or the test shows nothing"


@pytest.mark.parametrize(("num_clusters", "seed"), [(4, 0), (8, 1)])
def test_prices_alone_assign_within_the_limit_near_the_least_cost(num_clusters, seed):
    x = cloud(400, 3, seed)
    cost = squared_distances(x, 0.5 * torch.randn(num_clusters, 3, generator=generator(seed + 9), dtype=torch.float64))
    limit = capacity(400, num_clusters, 1.1)
    prices = balanced_prices(cost, limit)
    found = (cost + prices).argmin(1)
    assert found.bincount(minlength=num_clusters).max() <= limit and prices.min() == 0
    seats = cost.repeat_interleave(int(limit), 1).numpy()
    best = seats[linear_sum_assignment(seats)].sum()
    paid = float(cost[torch.arange(400), found].sum())
    assert float(cost.min(1).values.sum()) < 0.99 * best and best * (1 - 1e-9) <= paid <= 1.005 * best


@pytest.mark.parametrize("seed", range(2))
def test_weighted_clusters_stay_within_the_limit_near_the_least_cost(seed):
    num = 40
    num_clusters = 3
    x = cloud(num, 2, seed)
    weights = torch.randint(1, 40, (num,), generator=generator(seed)).double()
    centroids = 0.5 * torch.randn(num_clusters, 2, generator=generator(seed + 50), dtype=torch.float64)
    cost = squared_distances(x, centroids)
    limit = capacity(float(weights.sum()), num_clusters, 1.05)
    assignment = balanced_assignment(cost, weights, limit)
    assert float(loads(assignment, weights, num_clusters).max()) <= limit
    paid = float((weights * cost[torch.arange(num), assignment]).sum())

    each_once = np.kron(np.eye(num), np.ones(num_clusters))
    not_crowded = np.kron(weights.numpy(), np.eye(num_clusters))
    oracle = milp(
        (cost * weights.unsqueeze(1)).numpy().ravel(),
        constraints=[LinearConstraint(each_once, 1, 1), LinearConstraint(not_crowded, -np.inf, limit)],
        integrality=1,
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-3},
    )
    assert oracle.success
    assert paid <= 1.04 * oracle.fun


def test_swaps_fix_crowding_that_prices_cannot():
    # Three heavy samples and three light ones; every one of them wants cluster 0.
    weights = torch.tensor([10.0, 10.0, 10.0, 1.0, 1.0, 1.0])
    cost = torch.tensor([[0.0, 1.0, 1.0]]).repeat(6, 1)
    assignment = balanced_assignment(cost, weights, 11.0)
    assert loads(assignment, weights, 3).tolist() == [11.0, 11.0, 11.0]


def test_a_detour_over_another_crowded_cluster_is_found():
    """After the auction no single move or swap reaches the limit here."""
    weights = torch.tensor([3.0, 10.0, 1.0, 7.0, 9.0, 5.0])
    cost = torch.tensor([[49.0, 62, 57], [89, 95, 27], [52, 61, 69], [36, 12, 27], [26, 98, 17], [67, 99, 16]])
    limit = capacity(float(weights.sum()), 3, 1.1)
    assert loads(balanced_assignment(cost, weights, limit), weights, 3).max() <= limit == 12


def test_impossible_limits_come_as_near_as_they_can():
    weights = torch.tensor([5.0, 1.0, 1.0])
    assignment = balanced_assignment(torch.tensor([[0.0, 1.0]]).repeat(3, 1), weights, 4.0)
    assert sorted(loads(assignment, weights, 2).tolist()) == [2.0, 5.0]


def test_a_loose_limit_gives_the_nearest_cluster():
    cost = squared_distances(cloud(50, 2, 0), cloud(5, 2, 1))
    ones = torch.ones(50, dtype=torch.float64)
    torch.testing.assert_close(balanced_assignment(cost, ones, 50), cost.argmin(1))
    torch.testing.assert_close(balanced_assignment(cost, ones, math.inf), cost.argmin(1))


@pytest.mark.parametrize(("num_clusters", "dims"), [(3, 2), (8, 16)])
def test_without_a_limit_inertia_matches_scikit_learn(num_clusters, dims):
    x = torch.randn(600, dims, generator=generator(5), dtype=torch.float64) + 100
    centroids, assignment = balanced_kmeans(x, num_clusters, generator=generator(), num_iterations=100, num_restarts=10)
    reference = KMeans(num_clusters, n_init=10, random_state=0).fit(x.numpy()).inertia_
    assert inertia(x, centroids, assignment) == pytest.approx(reference, rel=0.02)
    torch.testing.assert_close(centroids[2], x[assignment == 2].mean(0))


def test_a_mean_far_from_zero_costs_no_precision():
    x = torch.randn(200, 2, generator=generator(8))
    near, far = (balanced_kmeans(x + offset, 5, generator=generator())[1] for offset in (0, 8192))
    # Adding the offset itself rounds to 2^-11, so a sample on a border may change sides.
    assert (near == far).float().mean() > 0.98


@pytest.mark.parametrize(("num", "seed", "is_within"), [(8, 9, False), (10, 1, True)])
def test_the_best_start_within_the_limit_beats_cheaper_ones_beyond_it(num, seed, is_within):
    """Of ten starts the cheapest exceeds the limit, or would be another one if weights did not count."""
    seeded = generator(seed)
    x = torch.randn(num, 2, generator=seeded, dtype=torch.float64)
    weights = torch.randint(1, 12, (num,), generator=seeded).double()
    limit = capacity(float(weights.sum()), 3, 1.05)
    options = {"weights": weights, "max_largest_over_mean": 1.05}

    def result(centroids, assignment):
        squares = (x - centroids[assignment]).square().sum(1)
        cost = float((weights * squares).sum())
        without = float(squares.sum())
        return cost, float(loads(assignment, weights, 3).max()) <= limit, without

    alone = []
    random = generator()
    for _ in range(10):
        alone.append(result(*balanced_kmeans(x, 3, random, **options)))

    allowed = [one for one in alone if one[1]]
    best = min(allowed)
    assert min(alone)[1] is is_within and allowed[0] > best
    assert not is_within or min(allowed, key=lambda one: one[2]) > best
    assert result(*balanced_kmeans(x, 3, generator(), num_restarts=10, **options)) == best


def test_a_sample_without_weight_is_no_start():
    """It is far from all others, so that chances by distance alone would choose it."""
    x = torch.tensor([[0.0], [1.0], [100.0]])
    centroids, assignment = balanced_kmeans(x, 2, generator(), weights=torch.tensor([1.0, 1.0, 0.0]))
    assert sorted(centroids.flatten().tolist()) == [0.0, 1.0] and assignment[0] != assignment[1] == assignment[2]


@pytest.mark.parametrize(
    ("total", "num_clusters", "ratio", "expected"),
    [(100, 4, 1.05, 26), (10, 4, 1.05, 3), (10, 5, 1.0, 2), (7, 2, 9.0, 31)],
)
def test_capacity_counts_whole_samples(total, num_clusters, ratio, expected):
    assert capacity(total, num_clusters, ratio) == expected
