import probe
import pytest
import torch


def gaussians(num, seed, distance=1.5):
    """Two clusters of 2×2 images with one covariance: the posterior is exactly a logistic regression."""
    generator = torch.Generator().manual_seed(seed)
    clusters = torch.arange(num) % 2
    x_0 = torch.randn(num, 1, 2, 2, generator=generator)
    x_0[:, 0, 0, 0] += distance * clusters
    return x_0, clusters


def bayes_nll(x_t, clusters, t, distance=1.5):
    variance = (1 - t) ** 2 + t**2
    shift = (1 - t) * distance
    logit = shift * (x_t[:, 0, 0, 0] - shift / 2) / variance
    return torch.nn.functional.binary_cross_entropy_with_logits(logit, clusters.float())


def nll_of(fitted, x_t, clusters):
    return float(-fitted.log_probabilities(probe.features(x_t)).gather(1, clusters[:, None]).mean())


@pytest.mark.parametrize("t", [0.0, 0.5])
def test_it_comes_close_to_the_bayes_classifier_where_that_is_linear(t):
    training = probe.Training(*gaussians(600, seed=0), seed=0, draws=(1,))
    _, fitted, _, _ = probe.fit_probe(training, t, lambda _: None)
    x_0, clusters = gaussians(4000, seed=1)
    x_t = probe.noised(x_0, t, draw=0, seed=7)
    exact, found = float(bayes_nll(x_t, clusters, t)), nll_of(fitted, x_t, clusters)
    assert exact - 0.005 < found < exact + 0.02
    assert found < 0.69  # it has learned something


def test_no_noisy_version_of_a_validated_sample_is_trained_on():
    # Clusters that are pure chance: who has seen another version of a sample knows its cluster by heart.
    x_0 = torch.randn(80, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    clusters = torch.arange(80) % 2
    training = probe.Training(x_0, clusters, seed=0, draws=(4,), mirrors=(True,), strengths=(1.0,))
    results = probe._path(training, 0.1, 4, True, lambda _: None)
    assert [accuracy for accuracy, _ in results.values()] == [pytest.approx(0.5, abs=0.2)]


def test_folds_have_their_share_of_each_cluster():
    clusters = torch.tensor([0] * 50 + [1] * 25)
    training = probe.Training(torch.zeros(75, 1, 2, 2), clusters, seed=0)
    folds = probe._folds(training)
    assert [int(((folds == f) & (clusters == 0)).sum()) for f in range(5)] == [10] * 5
    assert [int(((folds == f) & (clusters == 1)).sum()) for f in range(5)] == [5] * 5
