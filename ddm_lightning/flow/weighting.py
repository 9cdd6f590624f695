"""How much the squared error at each training time counts."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.prediction import unknown_prediction


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
