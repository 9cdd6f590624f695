"""Heun's method, the explicit trapezoidal rule: order 2, two evaluations a step."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import VelocityField, time_rows


def heun(velocity: VelocityField, x_t: Float[Tensor, "b *shape"], t: float, s: float) -> Float[Tensor, "b *shape"]:
    """``x_s = x_t + (s-t)·(velocity(x_t, t) + velocity(x_t + (s-t)·velocity(x_t, t), s))/2``.

    A step to s = 0 is Euler's (Karras et al., 2206.00364, algorithm 1): networks are not trained at t = 0 and
    the oracle has no velocity there. A single step of local order 2 leaves the global order at 2.
    """
    first = velocity(x_t, time_rows(t, x_t))
    x_s = x_t + (s - t) * first
    if s == 0:
        return x_s
    return x_t + (s - t) * 0.5 * (first + velocity(x_s, time_rows(s, x_s)))
