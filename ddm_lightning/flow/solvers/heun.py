"""``heun``: two evaluations per step, at both ends."""

from __future__ import annotations

from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import Samples, VelocityField, time_rows
from ddm_lightning.flow.solvers import Solver


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
