"""``euler``: one evaluation per step."""

from __future__ import annotations

from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import Samples, VelocityField, time_rows
from ddm_lightning.flow.solvers import Solver


@SOLVERS.register("euler")
class Euler(Solver):
    """Euler's method, order 1: ``x_s = x_t + (s-t)·velocity(x_t, t)``.

    One evaluation per step; exact if the velocity is constant along the path.
    """

    def step(self, velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
        """Follow the velocity at ``t``."""
        return x_t + (s - t) * velocity(x_t, time_rows(t, x_t))
