"""Whatever a network predicts, turned into the velocity of the linear path: the only place that does so."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import expand_time, velocity_target

PREDICTIONS = ("velocity", "epsilon", "x_0")

MIN_DATA_SCALE = 1e-2
"""Least 1 - t that a noise prediction is divided by (the floor of Heterogeneous DDM, 2603.06741)."""
MIN_NOISE_SCALE = 1e-3
"""Least t that a data prediction is divided by; below the last step of any usual sampler."""


def to_velocity(
    prediction: Float[Tensor, "b *shape"], x_t: Float[Tensor, "b *shape"], t: Float[Tensor, " b"], kind: str
) -> Float[Tensor, "b *shape"]:
    """The velocity that ``prediction`` of ``kind`` means at ``(x_t, t)``.

    From ``epsilon``: ``epsilon - (x_t - t·epsilon)/(1-t)``; from ``x_0``: ``(x_t - x_0)/t``. Exact for t in
    [``MIN_NOISE_SCALE``, 1 - ``MIN_DATA_SCALE``]. Beyond, the denominators stop shrinking, so the error of a
    network is amplified a bounded number of times; at t = 1 an exact epsilon then implies data of mean 0.

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
    raise unknown_prediction(kind)


def training_target(
    x_0: Float[Tensor, "b *shape"], noise: Float[Tensor, "b *shape"], kind: str
) -> Float[Tensor, "b *shape"]:
    """What a network that predicts ``kind`` regresses.

    Raises:
        ValueError: ``kind`` is none of ``PREDICTIONS``.
    """
    if kind == "velocity":
        return velocity_target(x_0, noise)
    if kind == "epsilon":
        return noise
    if kind == "x_0":
        return x_0
    raise unknown_prediction(kind)


def unknown_prediction(kind: str) -> ValueError:
    """The error of a word that is none of ``PREDICTIONS``."""
    return ValueError(f"prediction {kind!r} is none of {', '.join(PREDICTIONS)}")


def min_snr_weights(t: Float[Tensor, " b"], gamma: float, kind: str) -> Float[Tensor, " b"]:
    """Weights of the squared errors of ``kind`` that come to ``min(SNR, gamma)`` times the squared error in x_0.

    With ``SNR = ((1-t)/t)²`` (Min-SNR, Hang et al., 2303.09556, section 3.4). An error in x_0 is t times that of the
    velocity and t/(1-t) times that of the noise, hence ``min((1-t)², gamma·t²)`` and ``min(1, gamma/SNR)``. What is
    learned at each t stays the same; the weights say at which times a network is to be better.

    Args:
        t: times strictly inside (0, 1).
        gamma: the cap; 5 in the paper.
        kind: what the network predicts: ``velocity``, ``epsilon`` or ``x_0``.

    Raises:
        ValueError: ``kind`` is none of these.
    """
    snr = ((1 - t) / t).square()
    if kind == "velocity":
        return torch.minimum((1 - t).square(), gamma * t.square())
    if kind == "epsilon":
        return (gamma / snr).clamp(max=1)
    if kind == "x_0":
        return snr.clamp(max=gamma)
    raise unknown_prediction(kind)
