import numpy as np
import pytest
import torch
from cleanfid.fid import frechet_distance as cleanfid_distance

from ddm_lightning.core.registry import METRICS

D = 24


def features(num, shift=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(D, D, generator=torch.Generator().manual_seed(7)) / D**0.5
    return torch.randn(num, D, generator=generator) @ mix + shift


def metric(generated, real, **params):
    ((_, score),) = METRICS.build("fid", {"num_groups": 0, **params}).scores(generated, real).items()
    return score


def gaussian(rows):
    return np.mean(rows, 0), np.cov(rows, rowvar=False)


@pytest.mark.filterwarnings("ignore:The `disp` argument:DeprecationWarning")
def test_agrees_with_clean_fid_on_2000_features():
    generated = features(2000, 0.3, seed=1) * 1.5
    real = features(2000)
    (mean, covariance), (real_mean, real_covariance) = gaussian(generated.numpy()), gaussian(real.numpy())
    expected = cleanfid_distance(mean, covariance, real_mean, real_covariance)
    assert metric(generated, real).value == pytest.approx(expected, rel=1e-3)


def test_finite_and_exact_for_covariances_of_low_rank():
    generated = features(5, seed=1)
    real = features(7)
    # With S_g = C_gᵀ C_g, the trace of the root is the sum of the singular values of C_g C_rᵀ.
    centred = [(rows.double() - rows.double().mean(0)) / (len(rows) - 1) ** 0.5 for rows in (generated, real)]
    shared = torch.linalg.svdvals(centred[0] @ centred[1].T).sum()
    expected = (generated.double().mean(0) - real.double().mean(0)).square().sum()
    expected += sum(rows.square().sum() for rows in centred) - 2 * shared
    assert metric(generated, real).value == pytest.approx(float(expected), rel=1e-6)
    assert metric(real, real).value == pytest.approx(0, abs=1e-5)


def test_the_interval_is_that_of_independent_sets():
    scores = [metric(features(600, 0.4, 2 * i), features(600, seed=2 * i + 1), num_groups=20) for i in range(60)]
    scatter = torch.tensor([score.value for score in scores]).std()
    spread = torch.tensor([(score.high - score.low) / (2 * 1.96) for score in scores]).mean()
    assert 0.8 < float(spread / scatter) < 1.3  # wider with fewer images


def test_the_interval_leaves_out_every_third_image_of_both_sets():
    """The delete-a-group jackknife in numpy; sets of different sizes."""
    generated = features(40, 0.3, seed=1)
    real = features(50)
    kept = [[np.arange(len(rows)) % 3 != j for rows in (generated, real)] for j in range(3)]
    without = [metric(generated[a], real[b]).value for a, b in kept]
    score = metric(generated, real, num_groups=3)
    assert (score.high - score.low) / (2 * 1.96) == pytest.approx(np.sqrt(2) * np.std(without), rel=1e-5)
    assert (score.high + score.low) / 2 == pytest.approx(score.value)


@pytest.mark.parametrize(("name", "title"), [("inception", "FID (inception)"), ("pixels", "FD (pixels)")])
def test_only_inception_makes_it_fid(name, title):
    params = {"features_params": {"path": "x"}} if name == "inception" else {}
    metric = METRICS.build("fid", {"features": name, "num_groups": 0, **params})
    assert list(metric.scores(features(4), features(4, seed=1))) == [title]
