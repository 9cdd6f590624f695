"""The linear path from data (t = 0) to noise (t = 1) and its velocity (DDM, 2501.05450)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor


def expand_time(t: Float[Tensor, " b"], x: Float[Tensor, "b *shape"]) -> Float[Tensor, "b *ones"]:
    """``t`` with axes of length 1 appended until it broadcasts against ``x``."""
    return t.reshape(-1, *(1 for _ in x.shape[1:]))


def interpolate(
    x_0: Float[Tensor, "b *shape"], noise: Float[Tensor, "b *shape"], t: Float[Tensor, " b"]
) -> Float[Tensor, "b *shape"]:
    """``x_t = (1-t)·x_0 + t·noise``, in the widest dtype of the three."""
    time = expand_time(t, x_0)
    return (1 - time) * x_0 + time * noise


def velocity_target(x_0: Float[Tensor, "b *shape"], noise: Float[Tensor, "b *shape"]) -> Float[Tensor, "b *shape"]:
    """``dx_t/dt = noise - x_0``, what a velocity network regresses."""
    return noise - x_0


def x_0_from_velocity(
    x_t: Float[Tensor, "b *shape"], velocity: Float[Tensor, "b *shape"], t: Float[Tensor, " b"]
) -> Float[Tensor, "b *shape"]:
    """The data end of the line through ``x_t``: ``x_t - t·velocity``."""
    return x_t - expand_time(t, x_t) * velocity


def noise_from_velocity(
    x_t: Float[Tensor, "b *shape"], velocity: Float[Tensor, "b *shape"], t: Float[Tensor, " b"]
) -> Float[Tensor, "b *shape"]:
    """The noise end of the line through ``x_t``: ``x_t + (1-t)·velocity``."""
    return x_t + (1 - expand_time(t, x_t)) * velocity


VelocityField: TypeAlias = Callable[[Float[Tensor, "b *shape"], Float[Tensor, " b"]], Float[Tensor, "b *shape"]]
"""``velocity(x_t, t)``: the mean of ``noise - x_0`` given ``x_t``, row by row."""


def time_rows(t: float, x_t: Float[Tensor, "b *shape"]) -> Float[Tensor, " b"]:
    """The number ``t`` once a row of ``x_t``: float64 beside float64, else float32.

    Never narrower, because bfloat16 has 3 digits and would move t.
    """
    dtype = torch.promote_types(x_t.dtype, torch.float32)
    return torch.full((len(x_t),), t, dtype=dtype, device=x_t.device)
