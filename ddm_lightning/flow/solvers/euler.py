"""Euler's method: order 1, one evaluation a step."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import VelocityField, time_rows


def euler(velocity: VelocityField, x_t: Float[Tensor, "b *shape"], t: float, s: float) -> Float[Tensor, "b *shape"]:
    """``x_s = x_t + (s-t)·velocity(x_t, t)``; exact where the velocity is constant along the path."""
    return x_t + (s - t) * velocity(x_t, time_rows(t, x_t))
