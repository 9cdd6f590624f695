"""``ancestral``: the stochastic reverse chain."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import Samples, VelocityField, time_rows, x_0_from_velocity
from ddm_lightning.flow.solvers import Noise, Solver, TimeGrid, no_noise
from ddm_lightning.flow.timesteps import intervals


@SOLVERS.register("ancestral")
class Ancestral(Solver):
    """Sample x_s from q(x_s | x_t, x_0), with x_0 estimated from the velocity; see ``reverse_kernel``.

    One evaluation per step. With small steps the samples follow the distribution of the data; the error is of order 1.
    """

    is_stochastic = True

    def solve(self, velocity: VelocityField, x_1: Samples, times: TimeGrid, noise: Noise = no_noise) -> Samples:
        x_t = x_1
        for step, (t, s) in enumerate(intervals(times)):
            rows = time_rows(t, x_t)
            mean, variance = reverse_kernel(x_t, x_0_from_velocity(x_t, velocity(x_t, rows), rows), t, s)
            x_t = mean if s == 0 else mean + variance.sqrt() * noise(step)
        return x_t


def reverse_kernel(
    x_t: Samples, x_0_hat: Samples, t: float | Float[Tensor, ""], s: float | Float[Tensor, ""]
) -> tuple[Samples, Float[Tensor, ""]]:
    """Mean and variance of the Gaussian q(x_s | x_t, x_0), for 0 <= s < t <= 1.

    This is DDPM's posterior (Ho et al., 2006.11239, eq. 7) on the linear path. As a Markov chain, the forward process
    is ``x_t = a·x_s + sqrt(t² - a²s²)·z`` with ``a = (1-t)/(1-s)``. Hence

        mean = (a·s²/t²)·x_t + ((1-s)(t² - a²s²)/t²)·x_0,    variance = s²(t² - a²s²)/t².

    ``t² - a²s²`` is computed as ``(t + a·s)(t - s)/(1-s)``, which loses no digits for s near t or near 1. At s = 0 the
    mean is exactly ``x_0_hat`` and the variance 0.

    Args:
        x_t: current state of the chain.
        x_0_hat: estimate of x_0.
        t: time of ``x_t``; a number, or a scalar tensor (which synchronises with a GPU).
        s: time to step to.

    Returns:
        The mean, and the variance of every entry as a float64 CPU scalar, usable with tensors on any device.

    Raises:
        ValueError: not 0 <= s < t <= 1.
    """
    t, s = float(t), float(s)
    if not 0 <= s < t <= 1:
        raise ValueError(f"a reverse step needs 0 <= s < t <= 1, got t={t} and s={s}")
    a = (1 - t) / (1 - s)
    data_weight = (t + a * s) * (t - s) / t**2
    mean = (a * s**2 / t**2) * x_t + data_weight * x_0_hat
    return mean, torch.tensor(s**2 * data_weight / (1 - s), dtype=torch.float64)
