"""``ralston``: the two-stage method of order 2 with the least bound on its error."""

from __future__ import annotations

from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import Samples, VelocityField, time_rows
from ddm_lightning.flow.solvers import Solver


@SOLVERS.register("ralston")
class Ralston(Solver):
    """Ralston's method, order 2 (Ralston, "Runge-Kutta methods with minimum error bounds", 1962).

    A quarter of the velocity at ``t``, three quarters of that two thirds of the step later. Two evaluations per step.
    """

    def step(self, velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
        """Follow the weighted mean of both velocities."""
        first = velocity(x_t, time_rows(t, x_t))
        later = t + (s - t) * 2 / 3
        second = velocity(x_t + (later - t) * first, time_rows(later, x_t))
        return x_t + (s - t) * (first + 3 * second) / 4
