from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from finite_set import FiniteSetOracle

from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.solvers.built_in import Ancestral, reverse_kernel
from ddm_lightning.flow.timesteps import sampling_times

STEPS = [(1.0, 0.95), (1.0, 0.5), (0.9, 0.88), (0.6, 0.2), (0.3, 0.01), (0.05, 0.04)]


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def coefficients(t: float, s: float) -> tuple[float, float, float]:
    """Weights of x_t and x_0 in the mean, and the variance, read off the kernel by probing it."""
    of_x_t, variance = reverse_kernel(scalar(1.0), scalar(0.0), t, s)
    of_x_0, _ = reverse_kernel(scalar(0.0), scalar(1.0), t, s)
    return of_x_t.item(), of_x_0.item(), variance.item()


@pytest.mark.parametrize(("t", "s"), STEPS)
def test_kernel_is_the_conditional_of_the_joint_gaussian(t: float, s: float) -> None:
    """x_s = (1-s)·x_0 + s·z, x_t = a·x_s + b·z'. Both a and b follow from x_t given x_0 being N((1-t)·x_0, t²)."""
    a = (1 - t) / (1 - s)
    maps = np.array([[s, 0.0], [a * s, np.sqrt(t**2 - (a * s) ** 2)]])
    covariance = maps @ maps.T
    gain = covariance[0, 1] / covariance[1, 1]
    mean = (1 - s) * -1.3 + gain * (0.8 - (1 - t) * -1.3)
    variance = covariance[0, 0] - gain * covariance[1, 0]

    got_mean, got_variance = reverse_kernel(scalar(0.8), scalar(-1.3), t, s)

    assert got_mean.item() == pytest.approx(mean, abs=1e-12)
    assert got_variance.item() == pytest.approx(variance, abs=1e-12)


@pytest.mark.parametrize(
    ("t", "s"), [(1.0, 1 - 1e-9), (1.0, 1e-9), (0.7, 0.7 - 1e-12), (1 - 1e-12, 1 - 1e-9), (1e-6, 1e-9)]
)
def test_nothing_cancels_at_the_edges(t: float, s: float) -> None:
    exact_t = Fraction(t)
    exact_s = Fraction(s)
    a = (1 - exact_t) / (1 - exact_s)
    rest = (exact_t**2 - a**2 * exact_s**2) / exact_t**2
    expected = (a * exact_s**2 / exact_t**2, (1 - exact_s) * rest, exact_s**2 * rest)
    assert coefficients(t, s) == pytest.approx([float(x) for x in expected], rel=1e-13, abs=0)


@pytest.mark.parametrize("t", [1.0, 0.37, 1e-3])
def test_a_step_to_the_data_is_the_estimate_to_the_bit(t: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x_t, x_0_hat = (torch.randn(5, 3, generator=generator) for _ in range(2))
    mean, variance = reverse_kernel(x_t, x_0_hat, t, 0.0)
    assert torch.equal(mean, x_0_hat) and variance == 0


def test_exact_chain_ends_on_the_set_in_its_proportions_and_draws_once_a_step_but_the_last() -> None:
    points = torch.tensor([[-3.0, 0.0], [3.0, 0.0], [3.0, 2.0], [0.0, -3.0]])
    oracle = FiniteSetOracle(points, torch.tensor([0, 1, 1, 1]), 2)
    asked: list[int] = []

    def noise(step: int) -> torch.Tensor:
        asked.append(step)
        return torch.randn(8000, 2, generator=keyed_generator(1, step))

    x_1 = torch.randn(8000, 2, generator=keyed_generator(1, "start"))
    x_0 = Ancestral().solve(oracle.velocity, x_1, sampling_times(60), noise)
    assert asked == list(range(59)) and x_0.dtype == torch.float32
    nearest = torch.cdist(x_0, points).min(1)
    assert nearest.values.quantile(0.99) < 0.05
    shares = nearest.indices.bincount(minlength=4) / 8000
    # Three standard errors are 0.0145; the rest is the discretisation.
    np.testing.assert_allclose(shares.numpy(), np.full(4, 0.25), atol=0.02)
