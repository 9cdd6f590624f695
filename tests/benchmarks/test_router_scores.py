import pytest
import torch
from router_scores import noised, router_classifier, score, score_by_time, standard_error
from torchmetrics.functional.classification import multiclass_calibration_error

from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.oracle import FiniteSetOracle


def predictions(num=300, num_clusters=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(num, num_clusters, generator=generator, dtype=torch.float64)
    return logits.log_softmax(1), torch.randint(num_clusters, (num,), generator=generator)


def test_figures_agree_with_torchmetrics_and_cross_entropy():
    log_probabilities, clusters = predictions()
    found = score(log_probabilities, clusters, t=0.5)
    expected = multiclass_calibration_error(log_probabilities.exp(), clusters, num_classes=4, n_bins=15, norm="l1")
    assert found.calibration_error == pytest.approx(float(expected), abs=1e-6)
    assert found.nll == pytest.approx(float(torch.nn.functional.cross_entropy(log_probabilities, clusters)))
    assert found.accuracy == pytest.approx(float((log_probabilities.argmax(1) == clusters).double().mean()))
    assert float(found.share.sum()) == pytest.approx(1)
    assert float((found.share * found.hits).sum()) == pytest.approx(found.accuracy)


def test_sure_and_right_has_no_error_and_sure_and_wrong_has_a_finite_nll():
    sure = torch.tensor([[0.0, -400.0]]).log_softmax(1)
    right, wrong = score(sure, torch.tensor([0]), 0.0), score(sure, torch.tensor([1]), 0.0)
    assert (right.accuracy, right.nll, right.calibration_error) == (1, 0, 0)
    assert (wrong.accuracy, wrong.nll, wrong.calibration_error) == (0, 400, 1)


def test_the_exact_posterior_is_calibrated_and_beats_a_tempered_one():
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(8, 1, 2, 2, generator=generator)
    labels = torch.arange(8) % 3
    oracle = FiniteSetOracle(points, labels, 3)
    rows = torch.randint(8, (2000,), generator=generator)

    def exact(x_t, t):
        return oracle.cluster_posterior(x_t.double(), torch.full((len(x_t),), t).double()).clamp_min(1e-300).log()

    def sharpened(x_t, t):
        return (3 * exact(x_t, t)).log_softmax(1)

    found, sharp = (
        score_by_time(each, points[rows], labels[rows], times=(0.5, 0.75), num_draws=2) for each in (exact, sharpened)
    )
    for good, bad in zip(found, sharp, strict=True):
        assert good.accuracy == bad.accuracy  # the same order of clusters
        assert good.nll < bad.nll
        assert good.calibration_error < 0.03 < bad.calibration_error


def test_every_time_and_classifier_meets_the_same_noise():
    x_0 = torch.ones(2, 1, 2, 2)
    seen = []

    def spy(x_t, t):
        seen.append((x_t - (1 - t) * x_0) / t)
        return torch.zeros(2, 3).log_softmax(1)

    score_by_time(spy, x_0, torch.tensor([0, 1]), times=(0.25, 0.5), num_draws=2)
    torch.testing.assert_close(seen[0], seen[2])
    torch.testing.assert_close(seen[1], seen[3])
    assert not torch.allclose(seen[0], seen[1])
    assert torch.equal(noised(x_0, 0.0, draw=1, seed=0), x_0)
    assert not torch.equal(noised(x_0, 1.0, 0, 0), noised(x_0, 1.0, 0, 0, purpose="probe"))


def test_the_standard_error_counts_samples_and_not_draws():
    by_sample = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = float(by_sample.std() / 50**0.5)
    assert standard_error(by_sample, num_draws=1) == pytest.approx(expected)
    assert standard_error(by_sample.repeat(4), num_draws=4) == pytest.approx(expected)


class Echo(torch.nn.Module):
    """Logits that are the first pixel, the time and the condition's first entry."""

    def forward(self, x_t, t, condition):
        extra = torch.zeros(len(x_t)) if condition is None else condition.values[:, 0]
        return torch.stack([x_t[:, 0, 0, 0], t, extra], 1)


def test_router_rows_keep_their_conditions_over_batches(monkeypatch):
    monkeypatch.setattr("router_scores.BATCH_SIZE", 2)
    x_t = torch.arange(5.0).reshape(5, 1, 1, 1)
    condition = Condition.of(torch.arange(10.0).reshape(5, 2))
    expected = torch.stack([torch.arange(5.0), torch.full((5,), 0.5), torch.arange(0.0, 10.0, 2)], 1)
    found = router_classifier(Echo(), condition)(x_t, 0.5)
    torch.testing.assert_close(found, expected.double().log_softmax(1))
    expected[:, 2] = 0
    torch.testing.assert_close(router_classifier(Echo(), None)(x_t, 0.5), expected.double().log_softmax(1))
