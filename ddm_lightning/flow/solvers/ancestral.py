"""Ancestral sampling: a stochastic chain that draws x_s from q(x_s | x_t, x_0) with x_0 estimated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import VelocityField, time_rows, x_0_from_velocity
from ddm_lightning.flow.timesteps import intervals


def reverse_kernel(
    x_t: Float[Tensor, "b *shape"],
    x_0_hat: Float[Tensor, "b *shape"],
    t: float | Float[Tensor, ""],
    s: float | Float[Tensor, ""],
) -> tuple[Float[Tensor, "b *shape"], Float[Tensor, ""]]:
    """Mean and variance of the Gaussian q(x_s | x_t, x_0), 0 <= s < t <= 1.

    It is DDPM's posterior (Ho et al., 2006.11239, eq. 7) on the linear path. Noising as a Markov chain keeps
    ``x_t = a·x_s + sqrt(t² - a²s²)·z`` with ``a = (1-t)/(1-s)``, hence

        mean = (a·s²/t²)·x_t + ((1-s)(t² - a²s²)/t²)·x_0,    variance = s²(t² - a²s²)/t².

    ``t² - a²s²`` is computed as ``(t + a·s)(t - s)/(1-s)``, which cancels neither for s near t nor near 1. At
    s = 0 the mean is exactly ``x_0_hat`` and the variance 0.

    Args:
        x_t: where the chain is.
        x_0_hat: the estimate of x_0.
        t: the time of ``x_t``; a number, or a tensor without axes (on a GPU that synchronises).
        s: the time to step to.

    Returns:
        The mean, and the variance of every entry as a float64 CPU scalar, which combines with tensors anywhere.

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


def integrate_ancestral(
    velocity: VelocityField,
    x_1: Float[Tensor, "b *shape"],
    times: Float[Tensor, " num_times"],
    noise: Callable[[int], Float[Tensor, "b *shape"]],
) -> Float[Tensor, "b *shape"]:
    """Walk the chain along falling ``times`` (see ``timesteps.sampling_times``).

    Args:
        velocity: the field; ``x_t - t·velocity`` estimates x_0.
        x_1: the start, standard normal where ``times`` starts at 1.
        times: at least two, strictly falling.
        noise: ``noise(i)`` is the standard normal of step i; not asked for in a step to 0, which draws nothing.

    Raises:
        ValueError: bad ``times``.
    """
    x_t = x_1
    for step, (t, s) in enumerate(intervals(times)):
        rows = time_rows(t, x_t)
        mean, variance = reverse_kernel(x_t, x_0_from_velocity(x_t, velocity(x_t, rows), rows), t, s)
        x_t = mean if s == 0 else mean + variance.sqrt() * noise(step)
    return x_t
