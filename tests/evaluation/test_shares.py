"""Shares of clusters among images, on Gaussian clusters with known shares."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from ddm_lightning.evaluation import shares
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


@pytest.mark.parametrize(("distance", "over_multinomial"), [(1.0, (1.5, 4)), (8.0, (0.9, 1.1))])
def test_chance_is_that_of_new_samples(distance, over_multinomial, monkeypatch):
    """Of 64 samples whose clusters a classifier learned from 300 others can hardly, or easily, tell apart."""
    monkeypatch.setattr(shares, "WEIGHT_DECAYS", (1e-2,))
    monkeypatch.setattr(shares, "ROUNDS", 20)

    def drawn(seed, num):
        features, clusters = clusters_of([0.5, 0.5], seed, num)
        return features + (distance - 1) * clusters[:, None], clusters

    train = drawn(1000, 300)
    errors = []
    found = []
    for seed in range(120):
        estimator = ClusterShares(*train, *drawn(2 * seed, 300), 2)
        errors.append(total_variation(estimator.shares(drawn(2 * seed + 1, 64)[0]), torch.tensor([0.5, 0.5])))
        found += estimator.by_chance(64, seed).tolist()

    assert np.mean(found) == pytest.approx(np.mean(errors), rel=0.15)
    assert np.quantile(found, 0.95) == pytest.approx(np.quantile(errors, 0.95), rel=0.25)
    low, high = over_multinomial
    assert low < np.mean(found) / np.sqrt(2 / np.pi * 0.25 / 64) < high


def test_shares_depend_on_no_offset_or_unit_of_a_feature_and_are_never_negative():
    def moved(samples):
        return samples[0] * torch.logspace(-1, 2, samples[0].shape[1]) + 500, samples[1]

    plain = ClusterShares(*clusters_of([0.8, 0.2], 0), *clusters_of([0.8, 0.2], 1), 2)
    other = ClusterShares(*moved(clusters_of([0.8, 0.2], 0)), *moved(clusters_of([0.8, 0.2], 1)), 2)
    features, _ = given = clusters_of([0.4, 0.6], 2)
    assert other.shares(moved(given)[0]).tolist() == pytest.approx(plain.shares(features).tolist(), abs=2e-3)
    # Surer of the first cluster than any mixture can be.
    assert plain.shares(clusters_of([1.0, 0.0], 2)[0] - 2).tolist() == [1.0, 0.0]


def test_each_feature_is_standardised_by_its_own_spread():
    """Of two features, the one that tells the clusters apart has a thousandth of the other's spread."""

    def drawn(seed):
        features, clusters = clusters_of([0.5, 0.5], seed, 2000)
        other = torch.randn(2000, 1, generator=torch.Generator().manual_seed(100 + seed))
        return torch.cat([features / 1000, other], 1) + torch.tensor([3.0, -7.0]), clusters

    together = ClusterShares(*drawn(0), *drawn(1), 2)
    alone = ClusterShares(*clusters_of([0.5, 0.5], 0, 2000), *clusters_of([0.5, 0.5], 1, 2000), 2)
    assert together.accuracy == pytest.approx(alone.accuracy, abs=0.02) and alone.accuracy > 0.65


def test_chance_includes_that_of_the_images_that_give_the_confusion():
    """Of many images, judged by a confusion from 40: most of the error is the confusion's."""
    estimator = ClusterShares(*clusters_of([0.5, 0.5], 0, 2000), *clusters_of([0.5, 0.5], 1, 40), 2)
    assert float(estimator.by_chance(20_000, 0).mean()) > 0.03


def test_the_weight_decay_of_the_lowest_held_out_loss_is_taken(monkeypatch):
    """Of 150 samples with 40 features, of which three tell the clusters apart, weak decay learns the noise."""
    generator = torch.Generator().manual_seed(0)
    clusters = torch.randint(3, (300,), generator=generator)
    features = torch.randn(300, 40, generator=generator)
    features[torch.arange(300), clusters] += 1.5
    data = features[:150], clusters[:150], features[150:], clusters[150:], 3

    def loss(decays):
        monkeypatch.setattr(shares, "WEIGHT_DECAYS", decays)
        probabilities = ClusterShares(*data)._probabilities(features[150:])
        return float(functional.nll_loss(probabilities.log(), clusters[150:]))

    alone = [loss((decay,)) for decay in (1e-3, 1e-2, 1e-1)]
    assert loss((1e-3, 1e-2, 1e-1)) == pytest.approx(min(alone)) and max(alone) > 1.5 * min(alone)


def test_total_variation_by_hand():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    q = torch.tensor([[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]])
    assert total_variation(p, q) == pytest.approx(0.25)
