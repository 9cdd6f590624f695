"""The one interface between networks and mathematics: a velocity field."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

VelocityField: TypeAlias = Callable[[Float[Tensor, "b *shape"], Float[Tensor, " b"]], Float[Tensor, "b *shape"]]
"""``velocity(x_t, t)``: the mean of ``noise - x_0`` given ``x_t``, row by row."""


def time_rows(t: float, x_t: Float[Tensor, "b *shape"]) -> Float[Tensor, " b"]:
    """The number ``t`` once a row of ``x_t``: float64 beside float64, else float32.

    Never narrower, because bfloat16 has 3 digits and would move t.
    """
    dtype = torch.promote_types(x_t.dtype, torch.float32)
    return torch.full((len(x_t),), t, dtype=dtype, device=x_t.device)
