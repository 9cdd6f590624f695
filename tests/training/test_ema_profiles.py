import numpy as np
import pytest
from scipy.integrate import quad

from ddm_lightning.core.errors import UserError
from ddm_lightning.evaluation.ema_choice import mixture
from ddm_lightning.training.ema import Snapshot, exponent_of, power_decay


@pytest.mark.parametrize("exponent", [0.0, 0.5, 3.0, 6.94, 16.97, 60.0])
def test_a_width_is_the_standard_deviation_of_its_profile(exponent):
    """Of p(τ) ∝ τ^γ on [0, 1], by numerical integration."""

    def moment(power):
        return quad(lambda tau: (exponent + 1) * tau ** (exponent + power), 0, 1, epsabs=1e-13)[0]

    deviation = (moment(2) - moment(1) ** 2) ** 0.5

    assert exponent_of(deviation) == pytest.approx(exponent, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("width", [0.0, -0.1, 0.29])
def test_no_profile_has_a_width_of_0_or_above_that_of_equal_weights(width):
    with pytest.raises(UserError, match=r"above 0 and at most 0\.2887"):
        exponent_of(width)


def test_the_recursion_weighs_steps_by_their_power():
    """Written out, step τ of 2000 has the share ∫ of the profile over (τ − 1, τ], to 1/t."""
    exponent = 6.94
    num = 2000
    kept = np.array([power_decay(exponent, step) for step in range(1, num + 1)])
    written_out = (1 - kept) * np.append(np.cumprod(kept[::-1])[::-1][1:], 1.0)

    assert written_out.sum() == pytest.approx(1)

    edges = (np.arange(num + 1) / num) ** (exponent + 1)
    np.testing.assert_allclose(written_out, np.diff(edges), atol=1e-9 + 1e-3 * np.diff(edges).max())


def averaged(values, width):
    """The average after each step."""
    exponent = exponent_of(width)
    average = np.zeros_like(values[0])
    found = []
    for step, value in enumerate(values, start=1):
        kept = power_decay(exponent, step)
        average = kept * average + (1 - kept) * value
        found.append(average)

    return found


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("width", [0.03, 0.05, 0.07, 0.1, 0.15, 0.2])
def test_snapshots_of_two_widths_give_any_width(width, offset):
    """Of random walks, as weights are, about 0 or far from it: against the average that was kept all the time."""
    walks = offset + np.cumsum(np.random.default_rng(0).normal(size=(4000, 50)), axis=0)
    kept = {tracked: averaged(walks, tracked) for tracked in (0.05, 0.1)}
    snapshots = [Snapshot(tracked, step) for tracked in kept for step in range(250, 4001, 250)]
    stored = np.stack([kept[snapshot.width][snapshot.step - 1] for snapshot in snapshots])
    exact = averaged(walks, width)[-1]
    shares, misfit = mixture(snapshots, width, 4000)
    error = np.linalg.norm(shares @ stored - exact) / np.linalg.norm(exact - walks[-1])

    assert shares.sum() == pytest.approx(1, abs=1e-9)
    assert error < 0.02
    assert misfit < 0.05


@pytest.mark.parametrize("width", [0.02, 0.25])
def test_misfit_is_the_relative_error_of_the_profile(width):
    """By numerical integration of profiles on a fine grid of times."""
    snapshots = [Snapshot(tracked, step) for tracked in (0.05, 0.1) for step in range(1, 17)]
    times = (np.arange(160_000) + 0.5) / 10_000

    def profile(of, step):
        exponent = exponent_of(of)
        return np.where(times < step, (exponent + 1) / step * (times / step) ** exponent, 0.0)

    shares, misfit = mixture(snapshots, width, 16)
    made = sum(share * profile(one.width, one.step) for share, one in zip(shares, snapshots, strict=True))
    wanted = profile(width, 16)

    assert misfit == pytest.approx(np.linalg.norm(made - wanted) / np.linalg.norm(wanted), rel=1e-3)
    assert misfit > 0.05
