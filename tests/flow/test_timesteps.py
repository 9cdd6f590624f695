import numpy as np
import pytest
import torch
from scipy import special, stats

from ddm_lightning.flow.spec import shift_for
from ddm_lightning.flow.timesteps import (
    intervals,
    sample_timesteps,
    sampling_times,
    shift_timesteps,
    stratified_timesteps,
)


def draw(density, mean=0.0, std=1.0, shift=1.0, num=20_000, **more):
    return sample_timesteps(num, density, mean, std, shift, torch.Generator().manual_seed(7), "cpu", **more)


@pytest.mark.parametrize(("mean", "std", "shift"), [(0.0, 1.0, 1.0), (0.3, 1.2, 3.0)])
def test_logit_normal_has_normal_logits_which_a_shift_moves(mean, std, shift):
    t = draw("logit-normal", mean, std, shift).double().numpy()
    logits = np.log(t) - np.log1p(-t)
    assert stats.kstest(logits, stats.norm(mean + np.log(shift), std).cdf).pvalue > 0.01


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_uniform_has_the_shifted_uniform_distribution(shift):
    t = draw("uniform", shift=shift).double().numpy()
    assert stats.kstest(t, lambda x: x / (shift - (shift - 1) * x)).pvalue > 0.01


def test_a_shift_by_tokens_keeps_the_uncertainty_of_a_constant_image():
    """SD3, section 5.3.2: the mean of n equal cells has the standard error t/(1-t)/sqrt(n), alike at both times."""
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    shift = shift_for((7, 4, 24, 40), (4, 32, 32), 1.0, True)
    moved = shift_timesteps(t, shift)
    torch.testing.assert_close(moved / (1 - moved) / (24 * 40) ** 0.5, t / (1 - t) / 32)
    assert shift_for((24, 40), (32, 32), 3.0, True) == pytest.approx(3 * shift)
    assert shift_for((4, 24, 40), (4, 32, 32), 3.0, False) == shift_for((4, 32, 32), (4, 32, 32), 3.0, True) == 3.0


@pytest.mark.parametrize(
    ("density", "std", "shift"), [("logit-normal", 30.0, 1.0), ("uniform", 1.0, 1e6), ("uniform", 1.0, 1e-6)]
)
def test_times_stay_strictly_inside(density, std, shift):
    t = draw(density, std=std, shift=shift)
    assert t.dtype == torch.float32
    assert t.min() > 0 and t.max() < 1 and (1 - t).min() > 0


def test_draws_follow_the_generator_alone():
    torch.manual_seed(0)
    first = draw("logit-normal", num=5)
    torch.manual_seed(1)
    assert torch.equal(first, draw("logit-normal", num=5))


@pytest.mark.parametrize(
    ("mean", "std", "shift", "interval"),
    [
        (0.0, 1.0, 1.0, (0.5, 1.0)),
        (0.5, 0.8, 3.0, (0.0, 0.7)),
        (0.5, 0.8, 3.0, (0.7, 0.9)),
        (-3.0, 1.0, 1.0, (0.999, 1.0)),
    ],
)
def test_an_interval_takes_its_part_of_the_density_in_shifted_time(mean, std, shift, interval):
    """scipy's truncated normal, between the logits of the interval's ends; a shift moves the logits' mean."""
    t = draw("logit-normal", mean, std, shift, interval=interval).double().numpy()
    low, high = (special.logit(np.array(interval)) - mean - np.log(shift)) / std
    wanted = stats.truncnorm(low, high, mean + np.log(shift), std)
    assert stats.kstest(special.logit(t), wanted.cdf).pvalue > 0.01
    assert interval[0] - 1e-7 <= t.min() and t.max() <= interval[1]


def test_uniform_times_of_an_interval_follow_the_shift_and_whole_ones_stay_as_they_were():
    t = draw("uniform", shift=3.0, interval=(0.5, 0.8)).double().numpy()
    unshifted = t / (3 - 2 * t)
    assert stats.kstest(unshifted, stats.uniform(0.25, 4 / 7 - 0.25).cdf).pvalue > 0.01
    for density in ("uniform", "logit-normal"):
        assert torch.equal(draw(density, shift=3.0, interval=(0.0, 1.0)), draw(density, shift=3.0))


def test_shift_keeps_both_ends_and_composes():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    shifted = shift_timesteps(t, 3.0)
    assert shifted[0] == 0 and shifted[-1] == 1 and (shifted[1:-1] > t[1:-1]).all()
    torch.testing.assert_close(shift_timesteps(shifted, 1 / 3), t)
    assert shift_timesteps(torch.tensor([0.5]), 3.0).item() == pytest.approx(0.75)


def test_stratified_times_are_the_midpoints_of_equal_parts():
    expected = [0.0625, 0.1875, 0.3125, 0.4375, 0.5625, 0.6875, 0.8125, 0.9375]
    assert stratified_timesteps().tolist() == expected
    assert stratified_timesteps(2).tolist() == [0.25, 0.75]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [1.0, 3.0, 1e-3, 0.3])
@pytest.mark.parametrize("num_steps", [1, 7, 50])
def test_sampling_times_fall_from_exactly_one_to_exactly_zero(num_steps, shift, dtype):
    times = sampling_times(num_steps, shift, dtype=dtype)
    assert times.shape == (num_steps + 1,) and times.dtype == dtype
    assert times[0] == 1 and times[-1] == 0 and (times.diff() < 0).all()
    unshifted = shift_timesteps(times.double(), 1 / shift)
    np.testing.assert_allclose(unshifted.numpy(), np.linspace(1, 0, num_steps + 1), atol=1e-4)


def test_intervals_pair_neighbours():
    assert intervals(torch.tensor([1.0, 0.5, 0.0])) == [(1.0, 0.5), (0.5, 0.0)]


@pytest.mark.parametrize("density", ["uniform", "logit-normal"])
@pytest.mark.parametrize("low", [0.1, 0.3, 0.7])
def test_rounding_leads_no_time_out_of_a_narrow_interval(density, low):
    """So narrow that float32 has few numbers in it: both ends are drawn, or nearly."""
    t = draw(density, shift=3.0, interval=(low, low + 1e-6))
    ends = torch.tensor([low, low + 1e-6])
    assert ends[0] <= t.min() < ends[0] + 1e-7 and ends[1] - 1e-7 < t.max() <= ends[1]
