import numpy as np
import pytest
import torch
from finite_set import FiniteSetOracle
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp


def reference(points, labels, num_clusters, x_t, t):
    """Velocity [b d], cluster velocities [K b d] (nan if empty) and posterior [b K], point by point in numpy."""
    velocity, posterior = np.zeros_like(x_t), np.zeros((len(x_t), num_clusters))
    by_cluster = np.full((num_clusters, *x_t.shape), np.nan)
    for row, (x, time) in enumerate(zip(x_t, t, strict=True)):
        logs = -((x - (1 - time) * points) ** 2).sum(1) / (2 * time**2)
        weights = np.exp(logs - logsumexp(logs))
        velocity[row] = sum(w * (x - point) / time for w, point in zip(weights, points, strict=True))
        for k in set(labels.tolist()):
            own = labels == k
            posterior[row, k] = weights[own].sum()
            inside = np.exp(logs[own] - logsumexp(logs[own]))
            by_cluster[k, row] = (inside[:, None] * (x - points[own]) / time).sum(0)
    return velocity, by_cluster, posterior


def draw_set(seed, n, d, num_clusters, b=7):
    rng = np.random.default_rng(seed)
    # A sharp Dirichlet: shares from empty to nearly all.
    shares = rng.dirichlet(np.full(num_clusters, 0.7))
    labels = rng.choice(num_clusters, size=n, p=shares)
    points = rng.normal(size=(n, d)) + 2 * rng.normal(size=(num_clusters, d))[labels]
    t = np.concatenate([[1.0, 0.02], rng.uniform(0.02, 1, b - 2)])
    near = (1 - t)[:, None] * points[rng.integers(n, size=b)] + t[:, None] * rng.normal(size=(b, d))
    x_t = np.where(rng.random((b, 1)) < 0.8, near, 5 * rng.normal(size=(b, d)))
    return points, labels, x_t, t


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 40),
    d=st.integers(1, 6),
    num_clusters=st.integers(1, 5),
)
def test_clusters_weighted_by_their_posterior_are_the_whole_set(seed, n, d, num_clusters):
    points, labels, x_t, t = draw_set(seed, n, d, num_clusters)
    whole, by_cluster, posterior = reference(points, labels, num_clusters, x_t, t)
    oracle = FiniteSetOracle(torch.tensor(points), torch.tensor(labels), num_clusters)
    x, time = torch.tensor(x_t), torch.tensor(t)
    weights = oracle.cluster_posterior(x, time).numpy()
    np.testing.assert_allclose(weights, posterior, rtol=0, atol=1e-10)
    np.testing.assert_allclose(oracle.velocity(x, time).numpy(), whole, rtol=0, atol=1e-8)
    mixture = np.zeros_like(whole)
    for k in sorted(set(labels.tolist())):
        velocity = oracle.velocity(x, time, k).numpy()
        np.testing.assert_allclose(velocity, by_cluster[k], rtol=0, atol=1e-8)
        mixture += weights[:, [k]] * velocity
    np.testing.assert_allclose(mixture, whole, rtol=0, atol=1e-5)


def test_at_pure_noise_the_posterior_is_the_share_and_the_data_estimate_the_mean():
    points = torch.tensor([[0.0], [2.0], [4.0], [10.0]], dtype=torch.float64)
    oracle = FiniteSetOracle(points, torch.tensor([1, 1, 1, 0]), 3)
    x, t = torch.tensor([[0.5], [-3.0]], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    np.testing.assert_allclose(oracle.cluster_posterior(x, t).numpy(), [[0.25, 0.75, 0.0]] * 2, atol=1e-15)
    np.testing.assert_allclose(oracle.velocity(x, t).numpy(), x.numpy() - 4.0, atol=1e-14)
    np.testing.assert_allclose(oracle.velocity(x, t, 1).numpy(), x.numpy() - 2.0, atol=1e-14)


@pytest.mark.parametrize("far", [0.0, 1e4])
def test_the_nearest_point_wins_near_the_data_without_overflow(far):
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    oracle = FiniteSetOracle(points, torch.tensor([0, 1, 2]), 3)
    x, t = torch.tensor([[0.9 + far, 0.0]], dtype=torch.float64), torch.tensor([1e-4], dtype=torch.float64)
    np.testing.assert_allclose(oracle.cluster_posterior(x, t).numpy(), [[0.0, 1.0, 0.0]], atol=1e-12)
    np.testing.assert_allclose(oracle.velocity(x, t).numpy(), [[(far - 0.1) / 1e-4, 0.0]], rtol=1e-9, atol=1e-6)


def test_images_keep_their_shape_and_dtype():
    points, labels, x_t, t = draw_set(5, 20, 12, 2)
    exact = FiniteSetOracle(torch.tensor(points), torch.tensor(labels), 2)
    shaped = FiniteSetOracle(torch.tensor(points).reshape(-1, 3, 2, 2).float(), torch.tensor(labels), 2)
    x, time = torch.tensor(x_t).float(), torch.tensor(t).float()
    velocity = shaped.velocity(x.reshape(-1, 3, 2, 2), time)
    assert velocity.dtype == torch.float32 and velocity.shape == (7, 3, 2, 2)
    # In float64 inside: all that is lost is the rounding of the inputs, over the least t of 0.02.
    np.testing.assert_allclose(velocity.flatten(1).numpy(), exact.velocity(x.double(), time.double()), atol=1e-3)
    assert shaped.cluster_posterior(x.reshape(-1, 3, 2, 2), time).dtype == torch.float32


def test_what_has_no_velocity_is_refused():
    oracle = FiniteSetOracle(torch.zeros(2, 1), torch.tensor([0, 0]), 2)
    x = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="cluster 1 is empty"):
        oracle.velocity(x, torch.ones(2), 1)
