import numpy as np
import pytest
import torch
from finite_set import FiniteSetOracle
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax


def reference(points, labels, num_clusters, x_t, t):
    """Velocity [b d], velocity of each cluster that is not empty, and posterior [b K], in numpy."""
    distances = np.square(x_t[:, None] - (1 - t)[:, None, None] * points).sum(2)
    logs = -distances / (2 * t[:, None] ** 2)
    slopes = (x_t[:, None] - points) / t[:, None, None]
    weights = softmax(logs, axis=1)
    posterior = np.zeros((len(x_t), num_clusters))
    by_cluster = {}
    for k in set(labels.tolist()):
        own = labels == k
        posterior[:, k] = weights[:, own].sum(1)
        by_cluster[k] = np.einsum("bn,bnd->bd", softmax(logs[:, own], axis=1), slopes[:, own])

    return np.einsum("bn,bnd->bd", weights, slopes), by_cluster, posterior


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
    x = torch.tensor(x_t)
    time = torch.tensor(t)
    weights = oracle.cluster_posterior(x, time).numpy()
    np.testing.assert_allclose(weights, posterior, rtol=0, atol=1e-10)
    np.testing.assert_allclose(oracle.velocity(x, time).numpy(), whole, rtol=0, atol=1e-8)
    mixture = np.zeros_like(whole)
    for k, expected in by_cluster.items():
        velocity = oracle.velocity(x, time, k).numpy()
        np.testing.assert_allclose(velocity, expected, rtol=0, atol=1e-8)
        mixture += weights[:, [k]] * velocity

    np.testing.assert_allclose(mixture, whole, rtol=0, atol=1e-5)


def test_images_keep_their_shape_and_dtype():
    points, labels, x_t, t = (torch.tensor(values) for values in draw_set(5, 20, 12, 2))
    shaped = FiniteSetOracle(points.reshape(-1, 3, 2, 2).float(), labels, 2)

    velocity = shaped.velocity(x_t.reshape(-1, 3, 2, 2).float(), t.float())

    assert velocity.dtype == torch.float32
    # In float64 inside: all that is lost is the rounding of the inputs, over the least t of 0.02.
    expected = FiniteSetOracle(points, labels, 2).velocity(x_t, t).reshape(-1, 3, 2, 2)
    np.testing.assert_allclose(velocity.numpy(), expected, atol=1e-3)


def test_what_has_no_velocity_is_refused():
    oracle = FiniteSetOracle(torch.zeros(2, 1), torch.tensor([0, 0]), 2)
    with pytest.raises(ValueError, match="cluster 1 is empty"):
        oracle.velocity(torch.zeros(2, 1), torch.ones(2), 1)
