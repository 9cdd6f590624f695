"""Experts trained on other paths: every path and prediction against the exact posterior of a finite data set."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from ensemble_networks import ExactRouter, finite_set
from finite_set import FiniteSetOracle
from tiny_runs import TINY
from torch import Tensor, nn

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.path import PATHS, interpolate, to_velocity, training_target, velocity_loss_weights, velocity_of
from ddm_lightning.flow.solvers.built_in import Heun
from ddm_lightning.flow.spec import PREDICTIONS
from ddm_lightning.flow.timesteps import sampling_times

Scale = Callable[[Tensor], Tensor]
# alpha and sigma as the papers print them.
SCALES: dict[str, tuple[Scale, Scale]] = {
    "linear": (lambda u: 1 - u, lambda u: u),
    "cosine": (lambda u: torch.cos(math.pi * u / 2), lambda u: torch.sin(math.pi * u / 2)),
    "vp": (
        lambda u: torch.exp(-(u**2) * (20 - 0.1) / 4 - u * 0.1 / 2),
        lambda u: torch.sqrt(1 - torch.exp(-(u**2) * (20 - 0.1) / 2 - u * 0.1)),
    ),
}
PAIRS = [(path, kind) for path in SCALES for kind in PREDICTIONS]
TAUS = torch.linspace(0.02, 0.97, 39, dtype=torch.float64)


def scales_and_slopes(path: str, tau: Tensor) -> tuple[Tensor, ...]:
    h = 1e-6
    alpha, sigma = SCALES[path]
    slopes = ((one(tau + h) - one(tau - h)) / (2 * h) for one in (alpha, sigma))
    return tuple(one[:, None] for one in (alpha(tau), sigma(tau), *slopes))


class OnPath(nn.Module):
    """The exact expert of a finite set, trained on ``path`` to predict ``prediction``."""

    def __init__(self, points: Tensor, path: str, prediction: str) -> None:
        super().__init__()
        self.points = points
        self.trained_on = path
        self.prediction = prediction

    def forward(self, x: Tensor, tau: Tensor, _: object) -> Tensor:
        assert ((tau > 0) & (tau <= 1)).all()
        alpha, sigma, d_alpha, d_sigma = scales_and_slopes(self.trained_on, tau.double().clamp(max=1 - 2e-6))
        squares = (x[:, None] - alpha[:, :, None] * self.points).square().sum(2)
        x_0 = (-squares / (2 * sigma**2)).softmax(1) @ self.points
        noise = (x - alpha * x_0) / sigma
        answers = {"x_0": x_0, "epsilon": noise, "velocity": d_alpha * x_0 + d_sigma * noise}
        return answers[self.prediction].to(x.dtype)


def test_the_paths_are_those_of_the_schema() -> None:
    assert set(PATHS) == set(SCALES)
    with pytest.raises(UserError, match=f"must be one of {', '.join(PATHS)}"):
        load_experiment(TINY, ["expert.path=sine"])


@pytest.mark.parametrize(("path", "kind"), PAIRS)
def test_an_exact_expert_gives_the_exact_velocity(path: str, kind: str) -> None:
    points, labels = finite_set([5, 3], dim=3, seed=0)
    oracle = FiniteSetOracle(points, labels, 2)
    t = torch.linspace(0.02, 0.985, 60, dtype=torch.float64)
    noise = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_t = interpolate(points[torch.arange(60) % 8], noise, t)

    got = Ensemble([OnPath(points, path, kind)], None, [1.0], paths=[path]).velocity(x_t, t)

    torch.testing.assert_close(got, oracle.velocity(x_t, t), rtol=1e-5, atol=1e-5)


def test_experts_with_different_objectives_are_one_mixture() -> None:
    points, labels = finite_set([5, 3, 2, 4], dim=3, seed=1)
    oracle = FiniteSetOracle(points, labels, 4)
    objectives = [("cosine", "epsilon"), ("vp", "x_0"), ("vp", "velocity"), ("linear", "velocity")]
    experts = [OnPath(points[labels == k], *one) for k, one in enumerate(objectives)]
    ensemble = Ensemble(
        experts, ExactRouter(oracle), [5 / 14, 3 / 14, 2 / 14, 4 / 14], paths=[path for path, _ in objectives]
    )
    t = torch.linspace(0.02, 0.985, 40, dtype=torch.float64)
    x_t = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(ensemble.velocity(x_t, t), oracle.velocity(x_t, t), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("path", "kind"), [("vp", "epsilon"), ("vp", "velocity"), ("cosine", "x_0")])
def test_samples_start_from_pure_noise_and_end_on_the_set(path: str, kind: str) -> None:
    """At t = 1, which the VP path does not reach, in float32 as in sampling."""
    points = torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    ensemble = Ensemble([OnPath(points.double(), path, kind)], None, [1.0], paths=[path])
    x_1 = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    first = ensemble.velocity(x_1, torch.ones(64))
    assert (first - (x_1 - points.mean(0))).abs().mean() < 0.4  # clamped at alpha = 0.01
    x_0 = Heun().solve(ensemble.velocity, x_1, sampling_times(60))
    nearest = torch.cdist(x_0, points).min(1)
    assert nearest.values.quantile(0.9) < 0.05 and len(nearest.indices.unique()) == 3


@pytest.mark.parametrize("path", PATHS)
def test_equal_signal_to_noise_ratio(path: str) -> None:
    t = torch.cat([torch.tensor([1e-3]), torch.linspace(0.01, 0.993, 40)]).double()
    x_t = torch.randn(41, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x_tau, tau = PATHS[path].from_linear(x_t, t)
    alpha, sigma, *_ = scales_and_slopes(path, tau)
    torch.testing.assert_close((sigma / alpha)[:, 0], t / (1 - t), rtol=1e-6, atol=0)
    # The data's share of x_t is 1 - t, and of x_tau alpha.
    torch.testing.assert_close(x_tau / x_t, (alpha / (1 - t)[:, None]).expand(-1, 2), rtol=1e-6, atol=0)
    back = PATHS[path].to_linear(x_tau, tau)
    torch.testing.assert_close(back, (x_t, t), rtol=1e-9, atol=0)
    single = PATHS[path].from_linear(x_t.float(), t.float())[1]
    torch.testing.assert_close(single, tau.float(), rtol=1e-4, atol=0)


def test_the_linear_path_is_itself_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        x, t = torch.randn(2, 200_000, generator=generator, dtype=dtype)
        x = x[:, None]
        t = t.sigmoid() ** 4  # also near the data
        for found in (PATHS["linear"].from_linear(x, t), PATHS["linear"].to_linear(x, t)):
            assert torch.equal(found[0], x) and torch.equal(found[1], t)

        assert bool((PATHS["linear"].velocity_scale(t) == 1).all())

    half = torch.ones(2, 3, dtype=torch.float16)
    seen = velocity_of(lambda *given: given[0], half, torch.ones(2), None, "velocity")
    assert seen is half  # not copied, nor of another type


@pytest.mark.parametrize("path", PATHS)
def test_training_follows_the_path(path: str) -> None:
    x_0, noise = torch.randn(2, 39, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alpha, sigma, d_alpha, d_sigma = scales_and_slopes(path, TAUS)
    torch.testing.assert_close(interpolate(x_0, noise, TAUS, path), alpha * x_0 + sigma * noise)
    target = training_target(x_0, noise, TAUS, "velocity", path)
    torch.testing.assert_close(target, d_alpha * x_0 + d_sigma * noise, rtol=1e-6, atol=1e-8)
    assert torch.equal(training_target(x_0, noise, TAUS, "x_0", path), x_0)
    assert torch.equal(training_target(x_0, noise, TAUS, "epsilon", path), noise)


@pytest.mark.parametrize(("path", "kind"), PAIRS)
def test_loss_weights_are_those_of_the_implied_error(path: str, kind: str) -> None:
    x_0, noise, error = torch.randn(3, 39, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = 0.1 * error
    x_tau = interpolate(x_0, noise, TAUS, path)
    target = training_target(x_0, noise, TAUS, kind, path)
    in_velocity = to_velocity(target + error, x_tau, TAUS, kind, path) - (noise - x_0)
    t = PATHS[path].to_linear(x_tau, TAUS)[1]
    own = error.square().sum(1)
    inside = (t > 0.05) & (t < 0.95)  # elsewhere the divisors are clamped
    weights = velocity_loss_weights(TAUS, kind, path)
    torch.testing.assert_close((weights * own)[inside], in_velocity.square().sum(1)[inside], rtol=1e-8, atol=0)
