"""``dormand-prince``: order 5 with error control, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import MIN_NOISE_SCALE, Samples, Times, VelocityField, expand_time, time_rows
from ddm_lightning.flow.solvers import Noise, Solver, TimeGrid, no_noise
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


@SOLVERS.register("dormand-prince")
@dataclass(frozen=True)
class DormandPrince(Solver):
    """Dormand and Prince's pair of orders 5 and 4 (Hairer, Nørsett and Wanner, Solving ODEs I, table II.5.2).

    Each row has its own time and step, so that a sample does not depend on its batch. A step is accepted if its error,
    measured in ``atol + rtol·max(|x_t|, |x_s|)`` and averaged as a root mean square over the row, is at most 1
    (eq. II.4.11); the next step is chosen for an error of 1. Only the ends of ``times`` matter, and its first interval,
    which is the first step to try. A step evaluates the whole batch six times, and the slowest row sets the number of
    steps.

    From t = ``path.MIN_NOISE_SCALE`` one Euler step goes to 0.

    Args:
        rtol: tolerance relative to the sample.
        atol: tolerance in the units of the sample.
    """

    rtol: float = 1e-4
    atol: float = 1e-4

    def __post_init__(self) -> None:
        if not (self.rtol >= 0 and self.atol > 0):
            raise ValueError(f"rtol = {self.rtol} must be at least 0, and atol = {self.atol} above 0")

    def solve(self, velocity: VelocityField, x_1: Samples, times: TimeGrid, noise: Noise = no_noise) -> Samples:
        steps = intervals(times)
        (start, second), end = steps[0], steps[-1][1]
        stop = end or MIN_NOISE_SCALE
        x_t, t = x_1, time_rows(start, x_1)
        step = torch.full_like(t, start - second)
        slope = velocity(x_t, t)
        while bool((t > stop).any()):
            # A row that has arrived takes steps of length 0.
            step = torch.minimum(step.clamp_min(MIN_STEP), t - stop)
            x_s, next_slope, error = self._attempt(velocity, x_t, t, step, slope)
            # Not "error <= 1": a row that is not finite goes on, as it does with fixed steps.
            accepted = ~(error > 1) | (step <= MIN_STEP)
            rows = accepted.reshape(-1, *(1 for _ in x_t.shape[1:]))
            x_t, slope = torch.where(rows, x_s, x_t), torch.where(rows, next_slope, slope)
            t = torch.where(accepted, torch.where(step >= t - stop, stop, t - step), t)
            step = step * (0.9 * error**-0.2).nan_to_num(nan=5.0).clamp(0.2, 5.0)
        return x_t if end else x_t - expand_time(t, x_t) * slope

    def _attempt(
        self, velocity: VelocityField, x_t: Samples, t: Times, step: Times, slope: Samples
    ) -> tuple[Samples, Samples, Times]:
        """The value and the slope after ``step``, and the error of each row."""
        slopes, x_s = [slope], x_t
        length = expand_time(step, x_t)
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
