"""Classifier-free guidance (Ho and Salimans, 2207.12598), on every channel."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def guided(
    conditional: Float[Tensor, "b *shape"], unconditional: Float[Tensor, "b *shape"], scale: float
) -> Float[Tensor, "b *shape"]:
    """``unconditional + scale·(conditional - unconditional)``.

    ``scale`` 0 returns exactly ``unconditional`` and 1 exactly ``conditional``; the paper's w is ``scale - 1``.
    Velocity, noise and x_0 at one ``(x_t, t)`` are affine in each other, so guiding any of them is the same.
    """
    return torch.lerp(unconditional, conditional, scale)
