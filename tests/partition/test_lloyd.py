import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from sklearn.preprocessing import normalize

from ddm_lightning.config.experiment import PartitionConfig
from ddm_lightning.partition import lloyd, nearest
from ddm_lightning.partition.columns import Rows
from ddm_lightning.partition.kmeans import plus_plus
from ddm_lightning.partition.lloyd import lloyd_kmeans


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def blobs(num, num_blobs, dims, seed=0, spread=0.3, offset=0.0):
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, num_blobs + 1)
    of = random.choice(num_blobs, num, p=shares / shares.sum())
    centres = random.standard_normal((num_blobs, dims))
    return (centres[of] + spread * random.standard_normal((num, dims)) + offset).astype(np.float32)


def inertia(x, centroids):
    distances = np.linalg.norm(x[:, None].astype(np.float64) - np.asarray(centroids, np.float64), axis=2)
    return float(np.square(distances.min(1)).sum())


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """No cell is split for being large."""
    monkeypatch.setattr(lloyd, "LARGEST_OVER_MEAN", np.inf)


def fit(rows, num_clusters, metric="euclidean", num_iterations=20, seed=0, on_progress=lambda *_: None):
    rows = rows if isinstance(rows, Rows) else Rows([rows])
    config = PartitionConfig(num_fine_centroids=num_clusters, metric=metric, num_iterations=num_iterations)
    return lloyd_kmeans(rows, config, generator(seed), on_progress)


@pytest.mark.parametrize("metric", ["spherical", "euclidean"])
def test_passes_are_lloyds_iterations(monkeypatch, metric):
    x = blobs(900, 12, 6, offset=2.0)
    points = normalize(x.astype(np.float64)) if metric == "spherical" else x.astype(np.float64)
    start = torch.from_numpy(points[:8]).float()

    # What is taken off is the mean of the sample that it starts from, here all of them.
    centre = torch.from_numpy(points.mean(0)).float()
    monkeypatch.setattr(lloyd, "plus_plus", lambda *_: start - centre)
    monkeypatch.setattr(lloyd, "_SETTLING_ITERATIONS", 99)
    expected = points[:8].copy()
    for _ in range(3):
        nearest_to = np.linalg.norm(points[:, None] - expected, axis=2).argmin(1)
        expected = np.stack([points[nearest_to == k].mean(0) for k in range(8)])

    np.testing.assert_allclose(fit(x, 8, metric, num_iterations=3).numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("metric", "offset"), [("euclidean", 0.0), ("euclidean", 500.0), ("spherical", 0.0)])
def test_inertia_matches_scikit_learn(metric, offset):
    x = blobs(3000, 40, 8, offset=offset)
    points = normalize(x) if metric == "spherical" else x
    theirs = [KMeans(24, n_init=1, max_iter=20, random_state=seed).fit(points).inertia_ for seed in range(3)]
    ours = np.median([inertia(points, fit(x, 24, metric, seed=seed)) for seed in range(3)])
    assert ours <= 1.05 * np.median(theirs)


def test_splits_blocks_and_threads_change_no_bit(monkeypatch):
    x = blobs(3000, 20, 8).astype(np.float16)
    monkeypatch.setattr(nearest, "_MOST_ROWS", 300)
    pieces = Rows([x[:1], x[1:1234], x[1234:]])

    whole = fit(x, 12)
    torch.set_num_threads(2)
    try:
        assert torch.equal(fit(pieces, 12), whole)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)

    assert torch.equal(fit(x.astype(np.float32), 12), whole), "half precision is computed in float32"
    assert not torch.equal(fit(x, 12, seed=1), whole)


def test_empty_cells_split_others(monkeypatch):
    """All but one of the starting centroids lie far from every sample."""
    x = blobs(2000, 8, 4)
    far = torch.full((16, 4), 1e3) + torch.arange(16).unsqueeze(1)
    far[0] = 0
    monkeypatch.setattr(lloyd, "plus_plus", lambda *_: far.clone())
    centroids = fit(x, 16, num_iterations=20).numpy()
    counts = np.bincount(np.linalg.norm(x[:, None] - centroids, axis=2).argmin(1), minlength=16)
    assert counts.min() > 0
    assert inertia(x, centroids) < 1.15 * KMeans(16, n_init=1, random_state=0).fit(x).inertia_


def test_a_pile_of_near_duplicates_is_split(monkeypatch):
    random = np.random.default_rng(0)
    pile = 1 + 1e-3 * random.standard_normal((6000, 4))
    x = np.concatenate([pile, random.standard_normal((4000, 4))]).astype(np.float32)

    def largest(centroids):
        return np.bincount(np.linalg.norm(x[:, None] - centroids.numpy(), axis=2).argmin(1), minlength=40).max()

    assert largest(fit(x, 40)) > 4000
    monkeypatch.setattr(lloyd, "LARGEST_OVER_MEAN", 2.0)
    assert largest(fit(x, 40)) < 2000


@pytest.mark.parametrize(
    ("counts", "moved"),
    [
        ([600, 120, 130, 150], [True, True, False, False]),  # below half the mean of 250
        ([600, 130, 130, 140], [False] * 4),
        ([500, 100, 200, 200], [False] * 4),  # not above twice the mean
        ([300, 0, 350, 350], [False, True, True, False]),  # an empty cell is always given up
    ],
)
def test_which_cells_are_given_up_to_split_which(monkeypatch, counts, moved):
    monkeypatch.setattr(lloyd, "LARGEST_OVER_MEAN", 2.0)
    before = torch.arange(12.0).reshape(4, 3)
    after = lloyd._relocated(before, torch.tensor(counts), torch.tensor(counts) * 4.0, generator())
    assert (after != before).any(1).tolist() == moved


def test_the_last_two_iterations_move_no_centroid_to_another_cell(monkeypatch):
    calls = []
    ticks = []
    relocated = lloyd._relocated
    monkeypatch.setattr(lloyd, "_relocated", lambda *given: calls.append(given) or relocated(*given))

    fit(blobs(200, 4, 2), 4, num_iterations=5, on_progress=lambda *at: ticks.append(at))

    assert len(calls) == 3
    assert ticks == [(200 * done, 1200) for done in (1, 2, 3, 4, 5)]


def test_starting_centroids_find_small_far_groups():
    """A group of one in a thousand is found because it is far; rows drawn evenly would miss most."""
    x = 0.01 * torch.randn(4000, 3, generator=generator())
    corners = 10 * torch.eye(3).repeat(2, 1)[:3]
    x[:12] += corners.repeat(4, 1)
    chosen = plus_plus(x, 64, torch.ones(4000), generator(1))
    assert all(float((chosen - corner).norm(dim=1).min()) < 1 for corner in corners)
