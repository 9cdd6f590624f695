import numpy as np
import pytest
import torch

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import METRICS
from ddm_lightning.evaluation.metrics.features import kernel_distance, mean_over_subsets


def features(num, size=6, shift=0.0, seed=0):
    return torch.randn(num, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


@pytest.mark.parametrize("block", [1 << 25, 13])
def test_all_pairs_by_a_double_loop(monkeypatch, block):
    monkeypatch.setattr("ddm_lightning.evaluation.metrics.features._BLOCK", block)
    x = features(7).numpy()
    y = features(5, shift=0.5, seed=1).numpy()

    def kernel(a, b):
        return (a @ b / 6 + 1) ** 3

    def mean_of_pairs(rows):
        return np.mean([kernel(a, b) for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j])

    expected = mean_of_pairs(x) + mean_of_pairs(y) - 2 * np.mean([kernel(a, b) for a in x for b in y])
    found = kernel_distance(torch.from_numpy(x), torch.from_numpy(y))
    assert found.value == pytest.approx(expected, rel=1e-12)


def test_same_distribution_is_zero_within_the_spread_and_unbiased():
    # 60 repetitions: the mean of an unbiased estimate lies within four of its standard errors of 0.
    values = torch.tensor(
        [kernel_distance(features(50, seed=2 * i), features(30, seed=2 * i + 1)).value for i in range(60)]
    )
    assert abs(values.mean()) < 4 * values.std() / 60**0.5


def test_spread_is_the_standard_error():
    # Against the scatter of the estimate over independent sets; two distributions that differ.
    found = [kernel_distance(features(80, shift=0.5, seed=2 * i), features(60, seed=2 * i + 1)) for i in range(80)]
    scatter = torch.tensor([distance.value for distance in found]).std()
    spread = torch.tensor([distance.spread for distance in found]).mean()
    assert float(spread / scatter) == pytest.approx(1, abs=0.25)


def test_the_spread_does_not_depend_on_the_order_of_the_images():
    """Samples and held-out images may follow one another in the same order; their halves must not."""
    real = features(60)
    generated = features(60, shift=0.6)  # the same but for the shift
    spreads = [kernel_distance(generated[order], real).spread for order in (slice(None), torch.randperm(60))]
    assert spreads[0] == pytest.approx(spreads[1], rel=0.2)


def test_four_images_of_each_kind_are_enough():
    metric = METRICS.build("kid", {})
    metric.check_nums("kid", 4, 4)
    for nums in ((3, 4), (4, 3)):
        words = f"'kid' needs 4 images of each kind, not {nums[0]} samples, {nums[1]} real; enlarge evaluate.num_images"
        with pytest.raises(UserError, match=words):
            metric.check_nums("kid", *nums)


def test_subsets_give_what_clean_fid_gives_on_2000_features():
    from cleanfid.fid import kernel_distance as cleanfid_distance

    real = features(2000, 24)
    generated = features(2000, 24, shift=0.2, seed=1)
    expected = cleanfid_distance(real.numpy(), generated.numpy(), num_subsets=1, max_subset_size=2000)
    assert kernel_distance(generated, real).value == pytest.approx(expected, rel=1e-3)
    assert mean_over_subsets(generated, real, 1, max_size=2000) == pytest.approx(expected, rel=1e-3)
    # Subsets of 1,000 are drawn otherwise.
    expected = cleanfid_distance(real.numpy(), generated.numpy(), num_subsets=25, max_subset_size=1000)
    one = METRICS.build("kid", {"num_subsets": 25})
    scores = one.scores(generated, real)
    assert scores["KID (efficientnet-lite0, 25 subsets)"].value == pytest.approx(expected, rel=0.05)
