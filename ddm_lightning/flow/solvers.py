"""From noise to data: ODE solvers by name, and the ancestral chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import Samples, VelocityField, time_rows, x_0_from_velocity
from ddm_lightning.flow.timesteps import intervals

Step: TypeAlias = Callable[[VelocityField, Samples, float, float], Samples]
"""``step(velocity, x_t, t, s) -> x_s``."""


def euler(velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
    """Euler's method, order 1: ``x_s = x_t + (s-t)·velocity(x_t, t)``.

    One evaluation per step; exact if the velocity is constant along the path.
    """
    return x_t + (s - t) * velocity(x_t, time_rows(t, x_t))


def heun(velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
    """Heun's method, order 2: ``x_s = x_t + (s-t)·(velocity(x_t, t) + velocity(x_t + (s-t)·velocity(x_t, t), s))/2``.

    Also known as the explicit trapezoidal rule, or improved Euler. Two evaluations per step. A step to s = 0 is
    Euler's (Karras et al., 2206.00364, algorithm 1): networks are not trained at t = 0, and the oracle has no velocity
    there. The global order stays 2, because a single Euler step has local order 2.
    """
    first = velocity(x_t, time_rows(t, x_t))
    x_s = x_t + (s - t) * first
    if s == 0:
        return x_s
    return x_t + (s - t) * 0.5 * (first + velocity(x_s, time_rows(s, x_s)))


SOLVERS: dict[str, Step] = {"euler": euler, "heun": heun}
"""Solvers of dx/dt = velocity(x, t). ``integrate_ancestral`` is separate because it needs noise."""


def integrate(
    velocity: VelocityField, x_1: Samples, times: Float[Tensor, " num_times"], solver: str = "euler"
) -> Samples:
    """Solve dx/dt = velocity(x, t) along decreasing ``times``.

    >>> from ddm_lightning.flow.timesteps import sampling_times
    >>> towards_zero = lambda x_t, t: x_t / t[:, None]  # the velocity of a data set with the single point 0
    >>> x_0 = integrate(towards_zero, torch.randn(16, 2), sampling_times(num_steps=40), "heun")
    >>> bool(x_0.abs().max() < 1e-5)
    True

    Args:
        velocity: the field.
        x_1: the value at ``times[0]``.
        times: at least two, strictly decreasing within [0, 1], as from ``timesteps.sampling_times``.
        solver: a name in ``SOLVERS``.

    Returns:
        The value at ``times[-1]``: x_0.

    Raises:
        ValueError: unknown ``solver`` or bad ``times``.
    """
    if solver not in SOLVERS:
        raise ValueError(f"ODE solver {solver!r} is none of {', '.join(SOLVERS)}")
    x_t = x_1
    for t, s in intervals(times):
        x_t = SOLVERS[solver](velocity, x_t, t, s)
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


def integrate_ancestral(
    velocity: VelocityField, x_1: Samples, times: Float[Tensor, " num_times"], noise: Callable[[int], Samples]
) -> Samples:
    """Sample x_s from q(x_s | x_t, x_0) along decreasing ``times``, with x_0 estimated from the velocity.

    Args:
        velocity: the field; ``x_t - t·velocity`` estimates x_0.
        x_1: the start, standard normal if ``times`` starts at 1.
        times: at least two, strictly decreasing, as from ``timesteps.sampling_times``.
        noise: ``noise(i)`` returns the standard normal noise of step i; a step to 0 needs none.

    Raises:
        ValueError: bad ``times``.
    """
    x_t = x_1
    for step, (t, s) in enumerate(intervals(times)):
        rows = time_rows(t, x_t)
        mean, variance = reverse_kernel(x_t, x_0_from_velocity(x_t, velocity(x_t, rows), rows), t, s)
        x_t = mean if s == 0 else mean + variance.sqrt() * noise(step)
    return x_t
