"""The linear path from data (t = 0) to noise (t = 1), and its velocity (DDM, 2501.05450).

The loss of a velocity network:

    >>> network, x_0 = (lambda x_t, t: torch.zeros_like(x_t)), torch.randn(16, 4, 8, 8)
    >>> noise, t = torch.randn_like(x_0), torch.rand(16)
    >>> predicted = network(interpolate(x_0, noise, t), t)
    >>> loss = (predicted - velocity_target(x_0, noise)).square().mean()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor


def expand_time(t: Float[Tensor, " b"], x: Float[Tensor, "b *shape"]) -> Float[Tensor, "b *ones"]:
    """``t`` with axes of length 1 appended, to broadcast against ``x``."""
    return t.reshape(-1, *(1 for _ in x.shape[1:]))


def interpolate(
    x_0: Float[Tensor, "b *shape"], noise: Float[Tensor, "b *shape"], t: Float[Tensor, " b"]
) -> Float[Tensor, "b *shape"]:
    """``x_t = (1-t)·x_0 + t·noise``, in the widest dtype of the three."""
    time = expand_time(t, x_0)
    return (1 - time) * x_0 + time * noise


def velocity_target(x_0: Float[Tensor, "b *shape"], noise: Float[Tensor, "b *shape"]) -> Float[Tensor, "b *shape"]:
    """``dx_t/dt = noise - x_0``, the regression target of a velocity network."""
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
"""``velocity(x_t, t)``: the expected ``noise - x_0`` given ``x_t``, for each row."""


def time_rows(t: float, x_t: Float[Tensor, "b *shape"]) -> Float[Tensor, " b"]:
    """``t`` repeated for each row of ``x_t``, in float64 if ``x_t`` is float64, else in float32.

    Never narrower: bfloat16 has 3 digits and would change t.
    """
    dtype = torch.promote_types(x_t.dtype, torch.float32)
    return torch.full((len(x_t),), t, dtype=dtype, device=x_t.device)
