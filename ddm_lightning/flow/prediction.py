"""Network predictions: their velocity (converted here and nowhere else), training target, weights and guidance."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import expand_time, velocity_target

PREDICTIONS = ("velocity", "epsilon", "x_0")

MIN_DATA_SCALE = 1e-2
"""Smallest 1 - t by which a noise prediction is divided (as in Heterogeneous DDM, 2603.06741)."""
MIN_NOISE_SCALE = 1e-3
"""Smallest t by which a data prediction is divided; below the last step of any usual sampler."""


def to_velocity(
    prediction: Float[Tensor, "b *shape"], x_t: Float[Tensor, "b *shape"], t: Float[Tensor, " b"], kind: str
) -> Float[Tensor, "b *shape"]:
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


def training_target(
    x_0: Float[Tensor, "b *shape"], noise: Float[Tensor, "b *shape"], kind: str
) -> Float[Tensor, "b *shape"]:
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


def min_snr_weights(t: Float[Tensor, " b"], gamma: float, kind: str) -> Float[Tensor, " b"]:
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


def guided(
    conditional: Float[Tensor, "b *shape"], unconditional: Float[Tensor, "b *shape"], scale: float
) -> Float[Tensor, "b *shape"]:
    """Classifier-free guidance (Ho and Salimans, 2207.12598): ``unconditional + scale·(conditional - unconditional)``.

    ``scale`` 0 returns exactly ``unconditional`` and 1 exactly ``conditional``; the paper's w is ``scale - 1``.
    Velocity, noise and x_0 at one ``(x_t, t)`` are affine in each other, so guiding any of them gives the same result.
    """
    return torch.lerp(unconditional, conditional, scale)


def _unknown(kind: str) -> ValueError:
    return ValueError(f"prediction {kind!r} is none of {', '.join(PREDICTIONS)}")
