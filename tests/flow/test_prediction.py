from __future__ import annotations

import numpy as np
import pytest
import torch

from ddm_lightning.flow.path import (
    MIN_DATA_SCALE,
    MIN_NOISE_SCALE,
    PREDICTIONS,
    guided,
    interpolate,
    to_velocity,
    training_target,
    velocity_loss_weights,
    x_0_from_velocity,
)


def draw(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x_0, noise = (torch.randn(num, 2, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return x_0, noise


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_an_exact_prediction_gives_the_exact_velocity(kind: str) -> None:
    t = torch.linspace(MIN_NOISE_SCALE, 1 - MIN_DATA_SCALE, 50, dtype=torch.float64)
    x_0, noise = draw(50)
    velocity = to_velocity(training_target(x_0, noise, t, kind), interpolate(x_0, noise, t), t, kind)
    torch.testing.assert_close(velocity, noise - x_0, rtol=0, atol=1e-11)


def test_targets_are_what_their_names_say() -> None:
    x_0, noise = draw(2)
    assert torch.equal(training_target(x_0, noise, torch.ones(2), "x_0"), x_0)
    assert torch.equal(training_target(x_0, noise, torch.ones(2), "epsilon"), noise)
    assert torch.equal(training_target(x_0, noise, torch.ones(2), "velocity"), noise - x_0)


@pytest.mark.parametrize(
    ("kind", "largest"), [("velocity", 1), ("epsilon", 1 + 1 / MIN_DATA_SCALE), ("x_0", 1 / MIN_NOISE_SCALE)]
)
def test_an_error_of_the_network_is_amplified_a_bounded_number_of_times(kind: str, largest: float) -> None:
    t = torch.tensor([0.0, 1e-12, 1e-4, 0.5, 1 - 1e-4, 1 - 1e-12, 1.0], dtype=torch.float64)
    x_0, noise = draw(len(t))
    x_t, exact = interpolate(x_0, noise, t), training_target(x_0, noise, t, kind)
    error = to_velocity(exact + 1.0, x_t, t, kind) - to_velocity(exact, x_t, t, kind)
    assert error.abs().max() <= 1.0001 * largest
    assert error.isfinite().all()


def test_the_data_that_a_noise_prediction_implies_are_clamped_on_both_sides() -> None:
    x_t, half = torch.tensor([[-50.0], [-5.0], [5.0], [50.0]]), torch.full((4,), 0.5)
    assert to_velocity(torch.zeros(4, 1), x_t, half, "epsilon").tolist() == [[20.0], [10.0], [-10.0], [-20.0]]


def test_exact_epsilon_at_pure_noise_means_centred_data() -> None:
    _, noise = draw(3)
    assert torch.equal(to_velocity(noise, noise, torch.ones(3, dtype=torch.float64), "epsilon"), noise)


def test_unknown_kind_is_named() -> None:
    x_0, noise = draw(1)
    with pytest.raises(ValueError, match="'score' is none of velocity, epsilon, x_0"):
        to_velocity(x_0, noise, torch.ones(1), "score")
    with pytest.raises(ValueError, match="'score' is none of"):
        training_target(x_0, noise, torch.ones(1), "score")


@pytest.mark.parametrize("kind", PREDICTIONS)
def test_the_velocity_loss_is_the_error_of_the_velocity(kind: str) -> None:
    times = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    x_0, noise, error = torch.randn(3, len(times), 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = 0.1 * error  # no implied x_0 is clamped
    target = training_target(x_0, noise, times, kind)
    x_t = interpolate(x_0, noise, times)
    implied = to_velocity(target + error, x_t, times, kind)
    expected = (implied - (noise - x_0)).square().sum(1)
    torch.testing.assert_close(velocity_loss_weights(times, kind) * error.square().sum(1), expected)
    assert velocity_loss_weights(torch.tensor([0.0, 1.0]), kind).max() <= 400.001


def branches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, 2, 2, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("scale", [-0.5, 0.3, 1.5, 7.5])
def test_guidance_extrapolates_on_every_channel(scale: float) -> None:
    conditional, unconditional, _ = branches()
    expected = (1 - scale) * unconditional.numpy().astype(np.float64) + scale * conditional.numpy().astype(np.float64)
    np.testing.assert_allclose(guided(conditional, unconditional, scale).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_scales_zero_and_one_return_one_branch_to_the_bit() -> None:
    conditional, unconditional, _ = branches()
    assert torch.equal(guided(conditional, unconditional, 0.0), unconditional)
    assert torch.equal(guided(conditional, unconditional, 1.0), conditional)


def test_guiding_velocities_is_guiding_data_estimates() -> None:
    conditional, unconditional, x_t = (x.double() for x in branches())
    t = torch.tensor([0.1, 0.4, 0.8, 1.0], dtype=torch.float64)
    of_velocity = x_0_from_velocity(x_t, guided(conditional, unconditional, 4.0), t)
    of_data = guided(x_0_from_velocity(x_t, conditional, t), x_0_from_velocity(x_t, unconditional, t), 4.0)
    torch.testing.assert_close(of_velocity, of_data)
