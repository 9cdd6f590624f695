"""The built-in solvers: ``euler``, ``heun``, ``midpoint``, ``dpm++2m``, ``ancestral`` and ``dormand-prince``.

All but the last step along a given grid of times. The last chooses its steps by an estimate of the error, row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float

from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import (
    MIN_NOISE_SCALE,
    Samples,
    Times,
    VelocityField,
    expand_rows,
    time_rows,
    x_0_from_velocity,
)
from ddm_lightning.flow.solvers import Advance, Noise, OnStep, Solver, TimeGrid, no_noise, unchanged
from ddm_lightning.flow.timesteps import intervals

_STAGES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (1 / 5, (1 / 5,)),
    (3 / 10, (3 / 40, 9 / 40)),
    (4 / 5, (44 / 45, -56 / 15, 32 / 9)),
    (8 / 9, (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729)),
    (1.0, (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656)),
    (1.0, (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84)),
)
"""Node and coefficients of each stage but the first; the last stage is the solution of order 5."""
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
"""Weights of the slopes in the difference between the solutions of order 5 and 4."""
MIN_STEP = 1e-3
"""A step this short is accepted whatever its error, so that sampling ends even if the velocity jumps (``top-1``)."""


@SOLVERS.register("euler")
class Euler(Solver):
    """Euler's method, order 1: ``x_s = x_t + (s-t)·velocity(x_t, t)``.

    One evaluation per step; exact if the velocity is constant along the path.
    """

    def step(self, velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
        """Follow the velocity at ``t``."""
        return x_t + (s - t) * velocity(x_t, time_rows(t, x_t))


@SOLVERS.register("heun")
class Heun(Solver):
    """Heun's method, order 2: ``x_s = x_t + (s-t)·(velocity(x_t, t) + velocity(x_t + (s-t)·velocity(x_t, t), s))/2``.

    Also known as the explicit trapezoidal rule, or improved Euler. Two evaluations per step. A step to s = 0 is
    Euler's (Karras et al., 2206.00364, algorithm 1). The global order stays 2, because a single Euler step has local
    order 2.
    """

    def step(self, velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
        """Follow the mean of the velocities at ``t`` and at Euler's estimate of x_s."""
        first = velocity(x_t, time_rows(t, x_t))
        x_s = x_t + (s - t) * first
        if s == 0:
            return x_s

        return x_t + (s - t) * 0.5 * (first + velocity(x_s, time_rows(s, x_s)))


@SOLVERS.register("midpoint")
class Midpoint(Solver):
    """Explicit midpoint rule, order 2: follow the velocity that half an Euler step finds. Two evaluations per step."""

    def step(self, velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
        """Follow the velocity at ``(t + s)/2``."""
        middle = x_t + (s - t) / 2 * velocity(x_t, time_rows(t, x_t))
        return x_t + (s - t) * velocity(middle, time_rows((t + s) / 2, x_t))


@SOLVERS.register("dpm++2m")
class DPMSolver2M(Solver):
    """DPM-Solver++(2M) (Lu et al., 2211.01095, algorithm 2) with alpha = 1-t and sigma = t.

    It solves the ODE in ``lambda = log((1-t)/t)``, with the estimate of x_0 as the slope:
    ``x_s = (s/t)·x_t + ((t-s)/t)·D``. D extrapolates the last two estimates to the middle of the step in lambda:
    ``D = x_0(t) + (h/2h')·(x_0(t) - x_0(t'))``, where h and h' are the lengths of this step and the one before. The
    first step and a step to 0 take ``D = x_0(t)``, which is order 1; so does the one after t = 1, because h' is
    infinite there.
    """

    def stepper(self, velocity: VelocityField, noise: Noise) -> Advance:
        """Remember the estimate of x_0 and the length of the last step."""
        before: Samples | float = 0.0
        last = math.inf

        def advance(_: int, t: float, s: float, x_t: Samples) -> Samples:
            nonlocal before, last
            rows = time_rows(t, x_t)
            x_0 = x_0_from_velocity(x_t, velocity(x_t, rows), rows)
            length = _log_snr(s) - _log_snr(t)
            weight = 0.0
            if s > 0 and last < math.inf:
                weight = length / (2 * last)

            x_s = s / t * x_t + (t - s) / t * (x_0 + weight * (x_0 - before))
            before = x_0
            last = length
            return x_s

        return advance


def _log_snr(t: float) -> float:
    """``lambda``: half of log SNR; infinite at both ends."""
    if t == 0:
        return math.inf
    if t == 1:
        return -math.inf

    return math.log((1 - t) / t)


@SOLVERS.register("ancestral")
class Ancestral(Solver):
    """Sample x_s from q(x_s | x_t, x_0), with x_0 estimated from the velocity; see ``reverse_kernel``.

    One evaluation per step. With small steps the samples follow the distribution of the data; the error is of order 1.
    """

    is_stochastic = True

    def stepper(self, velocity: VelocityField, noise: Noise) -> Advance:
        """Draw each step's noise."""

        def advance(step: int, t: float, s: float, x_t: Samples) -> Samples:
            rows = time_rows(t, x_t)
            x_0 = x_0_from_velocity(x_t, velocity(x_t, rows), rows)
            mean, variance = reverse_kernel(x_t, x_0, t, s)
            if s == 0:
                return mean

            return mean + variance.sqrt() * noise(step)

        return advance


def reverse_kernel(x_t: Samples, x_0_hat: Samples, t: float, s: float) -> tuple[Samples, Float[torch.Tensor, ""]]:
    """Mean and variance of the Gaussian q(x_s | x_t, x_0), for 0 <= s < t <= 1.

    This is DDPM's posterior (Ho et al., 2006.11239, eq. 7) on the linear path. As a Markov chain, the forward process
    is ``x_t = a·x_s + sqrt(t² - a²s²)·z`` with ``a = (1-t)/(1-s)``. Hence

        mean = (a·s²/t²)·x_t + ((1-s)(t² - a²s²)/t²)·x_0,    variance = s²(t² - a²s²)/t².

    ``t² - a²s²`` is computed as ``(t + a·s)(t - s)/(1-s)``, which loses no digits for s near t or near 1. At s = 0 the
    mean is exactly ``x_0_hat`` and the variance 0.

    Args:
        x_t: current state of the chain.
        x_0_hat: estimate of x_0.
        t: time of ``x_t``.
        s: time to step to.

    Returns:
        The mean, and the variance of every entry as a float64 CPU scalar, usable with tensors on any device.
    """
    a = (1 - t) / (1 - s)
    data_weight = (t + a * s) * (t - s) / t**2
    mean = (a * s**2 / t**2) * x_t + data_weight * x_0_hat
    return mean, torch.tensor(s**2 * data_weight / (1 - s), dtype=torch.float64)


@SOLVERS.register("dormand-prince")
@dataclass(frozen=True)
class DormandPrince(Solver):
    """Dormand and Prince's pair of orders 5 and 4 (Hairer, Nørsett and Wanner, Solving ODEs I, table II.5.2).

    Each row has its own time and step, so that a sample does not depend on its batch. A step is accepted if its error,
    measured in ``atol + rtol·max(|x_t|, |x_s|)`` and averaged as a root mean square over the row, is at most 1
    (eq. II.4.11); the next step is chosen for an error of 1. Of ``times``, only the two ends count, and the first
    interval, which is the first step tried. A step evaluates the whole batch six times, and the slowest row sets the
    number of steps.

    The last step, from t = ``path.MIN_NOISE_SCALE`` to 0, is Euler's. ``on_step`` is called once, at the end.

    Args:
        rtol: tolerance relative to the sample.
        atol: tolerance in the units of the sample.
    """

    rtol: float = 1e-4
    atol: float = 1e-4

    def __post_init__(self) -> None:
        if not (self.rtol >= 0 and self.atol > 0):
            raise ValueError(f"rtol = {self.rtol} must be at least 0, and atol = {self.atol} above 0")

    def solve(
        self,
        velocity: VelocityField,
        x_1: Samples,
        times: TimeGrid,
        noise: Noise = no_noise,
        on_step: OnStep = unchanged,
    ) -> Samples:
        steps = intervals(times)
        start, second = steps[0]
        end = steps[-1][1]
        stop = end or MIN_NOISE_SCALE
        x_t = x_1
        t = time_rows(start, x_1)
        step = torch.full_like(t, start - second)
        slope = velocity(x_t, t)
        while bool((t > stop).any()):
            # A row that has arrived takes steps of length 0.
            step = torch.minimum(step.clamp_min(MIN_STEP), t - stop)
            x_s, next_slope, error = self._attempt(velocity, x_t, t, step, slope)
            # Not "error <= 1", so that a row that is not finite goes on, as it does with fixed steps.
            accepted = ~(error > 1) | (step <= MIN_STEP)
            rows = expand_rows(accepted, x_t)
            x_t = torch.where(rows, x_s, x_t)
            slope = torch.where(rows, next_slope, slope)
            reached = torch.where(step >= t - stop, stop, t - step)
            t = torch.where(accepted, reached, t)
            step = step * (0.9 * error**-0.2).nan_to_num(nan=5.0).clamp(0.2, 5.0)

        if not end:
            x_t = x_t - expand_rows(t, x_t) * slope

        return on_step(len(steps) - 1, end, x_t)

    def _attempt(
        self, velocity: VelocityField, x_t: Samples, t: Times, step: Times, slope: Samples
    ) -> tuple[Samples, Samples, Times]:
        """The value and the slope after ``step``, and the error of each row."""
        slopes = [slope]
        x_s = x_t
        length = expand_rows(step, x_t)
        for node, weights in _STAGES:
            x_s = x_t - length * _weighted(weights, slopes)
            slopes.append(velocity(x_s, t - node * step))

        scale = self.atol + self.rtol * torch.maximum(x_t.abs(), x_s.abs())
        error = (length * _weighted(_ERROR, slopes) / scale).flatten(1).square().mean(1).sqrt()
        return x_s, slopes[-1], error


def _weighted(weights: tuple[float, ...], slopes: list[Samples]) -> Samples:
    """Sum of the slopes with weights other than 0, always in the same order."""
    products = (weight * slope for weight, slope in zip(weights, slopes, strict=True) if weight)
    return sum(products, torch.zeros_like(slopes[0]))
