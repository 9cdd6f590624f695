from __future__ import annotations

import numpy as np
import pytest
import torch

from ddm_lightning.flow.guidance import guided
from ddm_lightning.flow.path import x_0_from_velocity


def draw(num: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 4, 2, 2, generator=generator) for _ in range(num)]


@pytest.mark.parametrize("scale", [-0.5, 0.3, 1.5, 7.5])
def test_guidance_extrapolates_on_every_channel(scale: float) -> None:
    conditional, unconditional, _ = draw()
    expected = (1 - scale) * unconditional.numpy().astype(np.float64) + scale * conditional.numpy().astype(np.float64)
    np.testing.assert_allclose(guided(conditional, unconditional, scale).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_scales_zero_and_one_return_one_branch_to_the_bit() -> None:
    conditional, unconditional, _ = draw()
    assert torch.equal(guided(conditional, unconditional, 0.0), unconditional)
    assert torch.equal(guided(conditional, unconditional, 1.0), conditional)


def test_guiding_velocities_is_guiding_data_estimates() -> None:
    conditional, unconditional, x_t = (x.double() for x in draw())
    t = torch.tensor([0.1, 0.4, 0.8, 1.0], dtype=torch.float64)
    of_velocity = x_0_from_velocity(x_t, guided(conditional, unconditional, 4.0), t)
    of_data = guided(x_0_from_velocity(x_t, conditional, t), x_0_from_velocity(x_t, unconditional, t), 4.0)
    torch.testing.assert_close(of_velocity, of_data)
