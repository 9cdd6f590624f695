from __future__ import annotations

import pytest
import torch

from ddm_lightning.flow.path import (
    MIN_DATA_SCALE,
    MIN_NOISE_SCALE,
    guided,
    interpolate,
    to_velocity,
    training_target,
    velocity_loss_weights,
)
from ddm_lightning.flow.spec import PREDICTIONS


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


@pytest.mark.parametrize(
    ("kind", "largest"), [("velocity", 1), ("epsilon", 1 + 1 / MIN_DATA_SCALE), ("x_0", 1 / MIN_NOISE_SCALE)]
)
def test_an_error_of_the_network_is_amplified_a_bounded_number_of_times(kind: str, largest: float) -> None:
    t = torch.tensor([0.0, 1e-12, 1e-4, 0.5, 1 - 1e-4, 1 - 1e-12, 1.0], dtype=torch.float64)
    x_0, noise = draw(len(t))
    x_t = interpolate(x_0, noise, t)
    exact = training_target(x_0, noise, t, kind)
    error = to_velocity(exact + 1.0, x_t, t, kind) - to_velocity(exact, x_t, t, kind)
    assert error.abs().max() <= 1.0001 * largest
    assert error.isfinite().all()
    assert velocity_loss_weights(t, kind).max() <= 400.001


def test_the_data_that_a_noise_prediction_implies_are_clamped_on_both_sides() -> None:
    x_t = torch.tensor([[-50.0], [-5.0], [5.0], [50.0]])
    half = torch.full((4,), 0.5)
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


def branches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, 2, 2, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("scale", [-0.5, 0.3, 7.5, torch.tensor([0.0, 0.3, 1.0, 7.5])], ids=str)
def test_guidance_extrapolates_on_every_channel(scale: float | torch.Tensor) -> None:
    conditional, unconditional = branches()
    each = torch.as_tensor(scale).double().reshape(-1, 1, 1, 1)
    expected = (1 - each) * unconditional.double() + each * conditional.double()

    torch.testing.assert_close(guided(conditional, unconditional, scale).double(), expected, rtol=1e-5, atol=1e-5)


def test_scales_zero_and_one_return_one_branch_to_the_bit() -> None:
    conditional, unconditional = branches()
    assert torch.equal(guided(conditional, unconditional, 0.0), unconditional)
    assert torch.equal(guided(conditional, unconditional, 1.0), conditional)
