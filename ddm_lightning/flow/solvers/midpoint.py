"""``midpoint``: two evaluations per step, the second one half-way."""

from __future__ import annotations

from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import Samples, VelocityField, time_rows
from ddm_lightning.flow.solvers import Solver


@SOLVERS.register("midpoint")
class Midpoint(Solver):
    """Explicit midpoint rule, order 2: follow the velocity that half an Euler step finds. Two evaluations per step."""

    def step(self, velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
        """Follow the velocity at ``(t + s)/2``."""
        middle = x_t + (s - t) / 2 * velocity(x_t, time_rows(t, x_t))
        return x_t + (s - t) * velocity(middle, time_rows((t + s) / 2, x_t))
