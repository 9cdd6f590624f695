from __future__ import annotations

import numpy as np
import pytest
import torch

from ddm_lightning.flow.oracle import FiniteSetOracle
from ddm_lightning.flow.path import VelocityField
from ddm_lightning.flow.solvers import SOLVERS, integrate
from ddm_lightning.flow.timesteps import sampling_times

START = torch.tensor([[0.3, -1.2], [2.0, 0.7], [-0.4, 0.1]], dtype=torch.float64)
MEAN, STD = 1.5, 0.4


def gaussian_field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The velocity of data N(MEAN, STD²): x_t has mean (1-t)·MEAN and variance (1-t)²STD² + t²."""
    t = t[:, None]
    variance = (1 - t) ** 2 * STD**2 + t**2
    return -MEAN + (t - (1 - t) * STD**2) / variance * (x_t - (1 - t) * MEAN)


def growing_field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return x_t * torch.cos(3 * t)[:, None]


# The flow of a Gaussian keeps each point's standard score; dx/dt = x·cos(3t) is separable.
PROBLEMS = [
    (gaussian_field, MEAN + STD * START),
    (growing_field, START * np.exp(-np.sin(3.0) / 3)),
]


@pytest.mark.parametrize("shift", [1.0, 2.0])
@pytest.mark.parametrize(("field", "solution"), PROBLEMS)
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("heun", 2)])
def test_measured_order_of_convergence(
    solver: str, order: int, field: VelocityField, solution: torch.Tensor, shift: float
) -> None:
    counts = [128, 256, 512, 1024]
    errors = [
        (integrate(field, START, sampling_times(n, shift, dtype=torch.float64), solver) - solution).abs().max().item()
        for n in counts
    ]
    measured = -np.polyfit(np.log(counts), np.log(errors), 1)[0]
    print(f"{solver} on {field.__name__}, shift {shift}: order {measured:.3f}")
    assert measured == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_straight_paths_are_solved_exactly_in_one_step(solver: str) -> None:
    point = torch.tensor([[4.0, -2.0]], dtype=torch.float64)
    oracle = FiniteSetOracle(point, torch.tensor([0]), 1)
    ended = integrate(oracle.velocity, START, sampling_times(1, dtype=torch.float64), solver)
    torch.testing.assert_close(ended, point.expand_as(START))


@pytest.mark.parametrize(("solver", "evaluations"), [("euler", 5), ("heun", 9)])
def test_the_field_is_asked_the_stated_number_of_times_and_never_at_the_data(solver: str, evaluations: int) -> None:
    asked: list[torch.Tensor] = []

    def field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        asked.append(t)
        return torch.zeros_like(x_t)

    assert torch.equal(integrate(field, START, sampling_times(5), solver), START)
    assert len(asked) == evaluations
    assert all(t.shape == (3,) and (t > 0).all() for t in asked)


def test_exact_flow_carries_noise_to_the_points_of_the_set() -> None:
    points = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    oracle = FiniteSetOracle(points, torch.tensor([0, 1, 1]), 2)
    noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ended = integrate(oracle.velocity, noise, sampling_times(200, dtype=torch.float64), "heun")
    distances = torch.cdist(ended, points).min(1).values
    assert distances.quantile(0.98) < 0.01


def test_unknown_solver_is_named() -> None:
    with pytest.raises(ValueError, match="'rk4' is none of euler, heun"):
        integrate(growing_field, START, sampling_times(2), "rk4")
