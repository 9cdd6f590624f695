from threading import Barrier

import numpy as np
import pytest
import torch

from ddm_lightning.partition import nearest as module
from ddm_lightning.partition.nearest import in_order, nearest


def near_ties(num, dims, seed=0):
    """Samples all but halfway between two centroids, closer than float32 can tell."""
    random = np.random.default_rng(seed)
    centroids = random.standard_normal((10, dims))
    pairs = np.stack([random.permutation(10)[:2] for _ in range(num)])
    x = centroids[pairs].mean(1) + 1e-7 * random.standard_normal((num, dims))
    return x.astype(np.float32), torch.from_numpy(centroids).float()


def in_float64(x, centroids, metric):
    x = x.astype(np.float64)
    x = x / np.linalg.norm(x, axis=1, keepdims=True) if metric == "spherical" else x
    return np.square(x[:, None] - centroids.double().numpy()).sum(2)


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_near_ties_are_decided_in_float64(offset):
    x, centroids = near_ties(2000, 32)
    x = x + np.float32(offset)
    centroids = centroids + offset
    distances = in_float64(x, centroids, "euclidean")
    found = nearest(x, centroids, "euclidean").numpy()
    assert (distances[np.arange(2000), found] <= distances.min(1) * (1 + 1e-9)).all()
    # Otherwise the test shows nothing.
    by_float32 = torch.cdist(torch.from_numpy(x), centroids).argmin(1).numpy()
    assert (by_float32 != distances.argmin(1)).sum() > 20


@pytest.mark.parametrize("metric", ["spherical", "euclidean"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_nearest_matches_a_direct_computation(metric, dtype):
    x = np.random.default_rng(0).standard_normal((700, 20)).astype(dtype)
    centroids = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    assert nearest(x, centroids, metric).tolist() == in_float64(x, centroids, metric).argmin(1).tolist()


@pytest.mark.parametrize("metric", ["spherical", "euclidean"])
def test_blocks_and_threads_change_nothing(metric):
    x, centroids = near_ties(3000, 16, seed=1)
    whole = nearest(x, centroids, metric)
    for size in (1, 7, 1000):
        blocks = [nearest(x[start : start + size], centroids, metric) for start in range(0, 300 * size, size)[:50]]
        assert torch.cat(blocks).tolist() == whole[: len(torch.cat(blocks))].tolist()

    torch.set_num_threads(2)
    try:
        assert torch.equal(nearest(x, centroids, metric), whole)
    finally:
        torch.set_num_threads(1)


def test_of_equally_near_centroids_the_first_is_taken():
    centroids = torch.tensor([[2.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert nearest(np.array([[1, 0], [0, 0], [1.2, 0]], np.float32), centroids, "euclidean").tolist() == [1, 1, 1]
    assert nearest(np.zeros((1, 2), np.float32), centroids, "spherical").tolist() == [1]
    assert nearest(np.zeros((1, 2), np.float32), centroids[:1], "euclidean").tolist() == [0]
    assert nearest(np.zeros((0, 2), np.float32), centroids, "euclidean").tolist() == []


def test_rounding_differences_count_as_ties():
    """Sums of the same numbers in many orders: mathematically all centroids are equally near."""
    random = np.random.default_rng(0)
    numbers = random.standard_normal(64)
    centroids = torch.from_numpy(np.stack([random.permutation(numbers) for _ in range(40)])).float()
    x = np.linspace(0.1, 3, 50, dtype=np.float32)[:, None] * np.ones((1, 64), np.float32)
    assert set(nearest(x, centroids, "euclidean").tolist()) == {0}


def test_results_and_errors_come_in_order_from_one_thread_per_core(monkeypatch):
    """Torch's number of threads is another matter: prepare sets it to what a member trains with, mostly one."""
    monkeypatch.setattr(module, "num_cores", lambda: 3)
    together = Barrier(3, timeout=60)

    def work(item):
        together.wait()
        return item * item, torch.get_num_threads()

    assert list(in_order(work, range(51), "cpu")) == [(item * item, 1) for item in range(51)]
    with pytest.raises(ZeroDivisionError):
        list(in_order(lambda item: 1 // (item - 7), range(50), "cpu"))

    assert torch.get_num_threads() == 1
