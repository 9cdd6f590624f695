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


@dataclass(frozen=True)
class Mixture:
    """How snapshots make an average of another width."""

    shares: Float[np.ndarray, " n"]
    """Of each snapshot, in float64; they sum to 1, and some are negative."""
    misfit: float
    """Norm of what the mixture's profile differs by from the wanted one, over the norm of that."""


def mixture(snapshots: Sequence[Snapshot], width: float, step: int) -> Mixture:
    """The mixture of snapshots nearest to the average of another ``width`` at ``step``, in least squares of profiles.

    The profiles' inner products are those of functions of continuous time.
    """
    exponents = np.array([exponent_of(snapshot.width) for snapshot in snapshots])
    steps = np.array([snapshot.step for snapshot in snapshots], dtype=np.float64)
    wanted, last = np.array(exponent_of(width)), np.array(float(step))
    products = _products(exponents[:, None], steps[:, None], exponents[None], steps[None])
    aims = _products(exponents, steps, wanted, last)
    # Neighbouring profiles are nearly the same: with ones in the diagonal fewest digits are lost.
    scale = np.sqrt(np.diagonal(products))
    # The shares have to sum to 1 (a Lagrange multiplier), or weights would be multiplied by their sum.
    border = scale.min() / scale
    system = np.block([[products / np.outer(scale, scale), border[:, None]], [border[None], np.zeros((1, 1))]])
    solved = np.linalg.lstsq(system, np.append(aims / scale, scale.min()), rcond=1e-14)[0][:-1] / scale
    whole = float(_products(wanted, last, wanted, last))
    rest = whole - 2 * solved @ aims + solved @ products @ solved
    return Mixture(solved, float(np.sqrt(max(0.0, rest) / whole)))


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
