"""``dpm++2m``: DPM-Solver++(2M), one evaluation per step and order 2."""

from __future__ import annotations

import math

from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import Samples, VelocityField, time_rows, x_0_from_velocity
from ddm_lightning.flow.solvers import Noise, Solver, TimeGrid, no_noise
from ddm_lightning.flow.timesteps import intervals


@SOLVERS.register("dpm++2m")
class DPMSolver2M(Solver):
    """DPM-Solver++(2M) (Lu et al., 2211.01095, algorithm 2) with alpha = 1-t and sigma = t.

    It solves the ODE in ``lambda = log((1-t)/t)``, with the estimate of x_0 as the slope:
    ``x_s = (s/t)·x_t + ((t-s)/t)·D``. D extrapolates the last two estimates to the middle of the step in lambda:
    ``D = x_0(t) + (h/2h')·(x_0(t) - x_0(t'))``, where h and h' are the lengths of this step and the one before. The
    first step and a step to 0 take ``D = x_0(t)``, which is order 1; so does the one after t = 1, because h' is
    infinite there.
    """

    def solve(self, velocity: VelocityField, x_1: Samples, times: TimeGrid, noise: Noise = no_noise) -> Samples:
        x_t = before = x_1
        last = math.inf
        for t, s in intervals(times):
            rows = time_rows(t, x_t)
            x_0 = x_0_from_velocity(x_t, velocity(x_t, rows), rows)
            length = _log_snr(s) - _log_snr(t)
            weight = 0.0 if s == 0 or last == math.inf else length / (2 * last)
            x_t = s / t * x_t + (t - s) / t * (x_0 + weight * (x_0 - before))
            before, last = x_0, length
        return x_t


def _log_snr(t: float) -> float:
    """``lambda``: half of log SNR; infinite at both ends."""
    return math.inf if t == 0 else -math.inf if t == 1 else math.log((1 - t) / t)
