"""Shares of clusters among images, on Gaussian clusters with known shares."""

import pytest
import torch

from ddm_lightning.evaluation.shares import ClusterShares, total_variation


def clusters_of(shares, seed, num=20_000):
    """Two one-dimensional clusters that overlap by half, and the cluster of each point."""
    generator = torch.Generator().manual_seed(seed)
    clusters = torch.multinomial(torch.tensor(shares), num, replacement=True, generator=generator)
    return clusters[:, None] + torch.randn(num, 1, generator=generator), clusters


@pytest.mark.parametrize("shares", [[0.8, 0.2], [0.2, 0.8], [1.0, 0.0]])
def test_overlapping_clusters_are_counted_without_bias(shares):
    """Neither counts nor mean probabilities of the classifier are shares: it errs on a third of the samples."""
    estimator = ClusterShares(*clusters_of([0.8, 0.2], 0), *clusters_of([0.8, 0.2], 1), 2)
    found = estimator.shares(clusters_of(shares, 2)[0])
    assert found.tolist() == pytest.approx(shares, abs=0.03)
    assert total_variation(found, torch.tensor([0.8, 0.2])) == pytest.approx(abs(0.8 - shares[0]), abs=0.03)
    assert 0.75 < estimator.accuracy < 0.9


def test_total_variation_by_hand():
    p, q = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]])
    assert total_variation(p, q) == pytest.approx(0.25)
