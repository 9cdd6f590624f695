"""The linear path from data (t = 0) to noise (t = 1), its velocity, and predictions of networks (DDM, 2501.05450).

A prediction of any kind becomes a velocity here and nowhere else.

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

PREDICTIONS = ("velocity", "epsilon", "x_0")
MIN_DATA_SCALE = 1e-2
"""Smallest 1 - t by which a noise prediction is divided (as in Heterogeneous DDM, 2603.06741)."""
MIN_LOSS_SCALE = 0.05
"""Smallest divisor of a training error."""
MIN_NOISE_SCALE = 1e-3
"""Smallest t by which a data prediction is divided; below the last step of any usual sampler."""

Samples: TypeAlias = Float[Tensor, "b *shape"]
"""Data, noise or velocities, one per row."""
Times: TypeAlias = Float[Tensor, " b"]
"""A time for each row."""
VelocityField: TypeAlias = Callable[[Samples, Times], Samples]
"""``velocity(x_t, t)``: the expected ``noise - x_0`` given ``x_t``, for each row."""


def expand_time(t: Times, x: Samples) -> Float[Tensor, "b *ones"]:
    """``t`` with axes of length 1 appended, to broadcast against ``x``."""
    return t.reshape(-1, *(1 for _ in x.shape[1:]))


def interpolate(x_0: Samples, noise: Samples, t: Times) -> Samples:
    """``x_t = (1-t)·x_0 + t·noise``, in the widest dtype of the three."""
    time = expand_time(t, x_0)
    return (1 - time) * x_0 + time * noise


def velocity_target(x_0: Samples, noise: Samples) -> Samples:
    """``dx_t/dt = noise - x_0``, the regression target of a velocity network."""
    return noise - x_0


def x_0_from_velocity(x_t: Samples, velocity: Samples, t: Times) -> Samples:
    """The data end of the line through ``x_t``: ``x_t - t·velocity``."""
    return x_t - expand_time(t, x_t) * velocity


def time_rows(t: float, x_t: Samples) -> Times:
    """``t`` repeated for each row of ``x_t``, in float64 if ``x_t`` is float64, else in float32.

    Never narrower: bfloat16 has 3 digits and would change t.
    """
    dtype = torch.promote_types(x_t.dtype, torch.float32)
    return torch.full((len(x_t),), t, dtype=dtype, device=x_t.device)


def to_velocity(prediction: Samples, x_t: Samples, t: Times, kind: str) -> Samples:
    """The velocity implied by a ``prediction`` of ``kind`` at ``(x_t, t)``.

    From ``epsilon``: ``epsilon - (x_t - t·epsilon)/(1-t)``; from ``x_0``: ``(x_t - x_0)/t``. Exact for t in
    [``MIN_NOISE_SCALE``, 1 - ``MIN_DATA_SCALE``]. Outside, the denominators are clamped, which bounds the amplification
    of a network's error; at t = 1 an exact epsilon then implies data with mean 0.

    Raises:
        ValueError: ``kind`` is none of ``PREDICTIONS``.
    """
    time = expand_time(t, x_t)
    if kind == "velocity":
        return prediction
    if kind == "epsilon":
        return prediction - (x_t - time * prediction) / (1 - time).clamp(min=MIN_DATA_SCALE)
    if kind == "x_0":
        return (x_t - prediction) / time.clamp(min=MIN_NOISE_SCALE)
    raise _unknown(kind)


def training_target(x_0: Samples, noise: Samples, kind: str) -> Samples:
    """The regression target of a network that predicts ``kind``.

    Raises:
        ValueError: ``kind`` is none of ``PREDICTIONS``.
    """
    if kind == "velocity":
        return velocity_target(x_0, noise)
    if kind == "epsilon":
        return noise
    if kind == "x_0":
        return x_0
    raise _unknown(kind)


def velocity_loss_weights(t: Times, kind: str) -> Times:
    """Loss weights that turn a squared error of ``kind`` into that of the implied velocity.

    The error in the velocity is the error in x_0 divided by t, and that in the noise divided by 1 - t. Divisors are at
    least ``MIN_LOSS_SCALE``, as in JiT (Li and He, 2511.13720), which trains x_0 predictions with this loss.

    Raises:
        ValueError: ``kind`` is none of ``PREDICTIONS``.
    """
    if kind not in PREDICTIONS:
        raise _unknown(kind)
    divisor = {"velocity": torch.ones_like(t), "epsilon": 1 - t, "x_0": t}[kind]
    return divisor.clamp(min=MIN_LOSS_SCALE) ** -2


def min_snr_weights(t: Times, gamma: float, kind: str) -> Times:
    """Loss weights that make a squared error of ``kind`` equal ``min(SNR, gamma)`` times the squared error in x_0.

    ``SNR = ((1-t)/t)²`` (Min-SNR, Hang et al., 2303.09556, section 3.4). The error in x_0 is t times the error in the
    velocity and t/(1-t) times the error in the noise. Hence the weights are ``min((1-t)², gamma·t²)`` for the velocity
    and ``min(1, gamma/SNR)`` for the noise. They do not change the optimum at each t, only the times at which a network
    of limited capacity is best.

    Args:
        t: times strictly inside (0, 1).
        gamma: the cap; 5 in the paper.
        kind: prediction of the network: ``velocity``, ``epsilon`` or ``x_0``.

    Raises:
        ValueError: ``kind`` is none of ``PREDICTIONS``.
    """
    snr = ((1 - t) / t).square()
    if kind == "velocity":
        return torch.minimum((1 - t).square(), gamma * t.square())
    if kind == "epsilon":
        return (gamma / snr).clamp(max=1)
    if kind == "x_0":
        return snr.clamp(max=gamma)
    raise _unknown(kind)


def guided(conditional: Samples, unconditional: Samples, scale: float) -> Samples:
    """Classifier-free guidance (Ho and Salimans, 2207.12598): ``unconditional + scale·(conditional - unconditional)``.

    ``scale`` 0 returns exactly ``unconditional`` and 1 exactly ``conditional``; the paper's w is ``scale - 1``.
    Velocity, noise and x_0 at one ``(x_t, t)`` are affine in each other, so guiding any of them gives the same result.
    """
    return torch.lerp(unconditional, conditional, scale)


def _unknown(kind: str) -> ValueError:
    return ValueError(f"prediction {kind!r} is none of {', '.join(PREDICTIONS)}")
