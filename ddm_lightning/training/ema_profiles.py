"""Power-function averages of weights, and averages of another width made of snapshots of them afterwards.

Source: Karras et al., arXiv 2312.02696 (EDM2), section 3 and appendix C. An average at step t with exponent γ weighs
the weights after step τ in proportion to τ^γ. Its width is the standard deviation of that profile as a share of t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

WIDEST = 12**-0.5
"""Of exponent 0, which weighs all steps alike."""


def exponent_of(width: float) -> float:
    """The exponent γ of a profile whose width is ``width``, in (0, ``WIDEST``].

    Its variance is (γ + 1) / ((γ + 2)² (γ + 3)) of t², which falls with γ.
    """
    if not 0 < width <= WIDEST * (1 + 1e-9):
        raise ValueError(f"a width is above 0 and at most {WIDEST:.4f}, not {width}")
    inverse = width**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return max(0.0, float(roots[np.isreal(roots)].real.max()))


def width_of(exponent: float) -> float:
    """The width of a profile (inverse of ``exponent_of``)."""
    return float(((exponent + 1) / ((exponent + 2) ** 2 * (exponent + 3))) ** 0.5)


def decay(exponent: float, step: int) -> float:
    """What an average keeps of itself at ``step``, counted from 1: (1 − 1/t)^(γ + 1)."""
    return float((1.0 - 1.0 / step) ** (exponent + 1.0))


@dataclass(frozen=True)
class Snapshot:
    """One average at one step."""

    width: float
    step: int


def shares(snapshots: Sequence[Snapshot], width: float, step: int) -> Float[np.ndarray, " n"]:
    """How much of each snapshot makes the average of another ``width`` at ``step``, the nearest in least squares.

    The profiles' inner products are those of functions of continuous time.

    Returns:
        A share a snapshot, in float64; some are negative.
    """
    exponents = np.array([exponent_of(snapshot.width) for snapshot in snapshots])
    steps = np.array([snapshot.step for snapshot in snapshots], dtype=np.float64)
    products = _products(exponents[:, None], steps[:, None], exponents[None], steps[None])
    wanted = _products(exponents, steps, np.array(exponent_of(width)), np.array(float(step)))
    # Profiles of neighbouring snapshots are nearly the same: the least squares of a matrix scaled to ones in its
    # diagonal lose fewest digits.
    scale = np.sqrt(np.diagonal(products))
    return np.linalg.lstsq(products / np.outer(scale, scale), wanted / scale, rcond=1e-14)[0] / scale


def _products(
    a: Float[np.ndarray, "*n"],
    step_a: Float[np.ndarray, "*n"],
    b: Float[np.ndarray, "*n"],
    step_b: Float[np.ndarray, "*n"],
) -> Float[np.ndarray, "*m"]:
    """∫ p_a p_b over the time before both steps, of p(τ) = (γ + 1) τ^γ / t^(γ + 1)."""
    earlier = np.minimum(step_a, step_b)
    # Powers of ratios below one: powers of steps overflow.
    overlap = (earlier / step_a) ** a * (earlier / step_b) ** b * earlier / (step_a * step_b)
    return (a + 1) * (b + 1) / (a + b + 1) * overlap
