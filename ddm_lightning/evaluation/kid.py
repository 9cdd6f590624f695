"""Kernel distance between two sets of pictures: KID (Bińkowski et al., 1801.01401) on EfficientNet-Lite0 features.

It is no FID, and no published KID either, which is measured on Inception features: compare it only with
figures of this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ddm_lightning.core.registry import FEATURES
from ddm_lightning.flow.randomness import keyed_generator

FEATURE_NETWORK = "efficientnet-lite0"
RESOLUTION = 112
NUM_HALVES = 200


def picture_features(images: UInt8[np.ndarray, "n h w 3"], device: str = "cpu") -> Float[Tensor, "n d"]:
    """The features that pictures are compared by.

    Raises:
        UserError: the package with the weights is missing.
    """
    network = FEATURES.build(FEATURE_NETWORK, {"resolution": RESOLUTION, "device": device})
    return torch.from_numpy(network.encode(images))


@dataclass(frozen=True, eq=False)
class KernelDistance:
    """An estimate with its uncertainty."""

    value: float
    """Unbiased, over all pairs; may be slightly negative."""
    halves: Float[Tensor, " num_halves"]
    """The same estimate on random halves of both sets."""

    @property
    def spread(self) -> float:
        """Standard error of ``value``.

        A mean over a random half, drawn without replacement, varies about the mean over all as much as the mean
        over all does about the truth; a kernel distance is such a mean to first order.
        """
        return float(self.halves.std())

    def minus(self, other: KernelDistance) -> tuple[float, float]:
        """The difference and its standard error, less what both owe to the same real pictures.

        Both have to come from ``kernel_distance`` with equal numbers of pictures, the same ``real`` and seed.
        """
        return self.value - other.value, float((self.halves - other.halves).std())


def kernel_distance(
    generated: Float[Tensor, "n d"], real: Float[Tensor, "m d"], *, num_halves: int = NUM_HALVES, seed: int = 0
) -> KernelDistance:
    """The squared maximum mean discrepancy with the kernel (x·y/d + 1)³, all pairs, unbiased, in float64.

    Equation 4 of 1801.01401; the published protocol averages it over subsets of 1,000 pictures, which a few hundred
    held-out pictures do not allow and all pairs make needless. Takes (n + m)² numbers of memory.

    Args:
        generated: features of one set.
        real: features of the other.
        num_halves: random halves for the spread.
        seed: of the halves; the same for sets that are to be compared.

    Raises:
        ValueError: fewer than four pictures in a set, or features of different sizes.
    """
    if min(len(generated), len(real)) < 4 or generated.shape[1] != real.shape[1]:
        raise ValueError(f"features [{list(generated.shape)}] and [{list(real.shape)}]: at least 4 rows, equal columns")
    generated, real = generated.double(), real.double()
    within, across, within_real = _kernel(generated, generated), _kernel(generated, real), _kernel(real, real)

    def estimates(rows: Float[Tensor, "r n"], real_rows: Float[Tensor, "r m"]) -> Float[Tensor, " r"]:
        cross = ((rows @ across) * real_rows).sum(1) / (rows.sum(1) * real_rows.sum(1))
        return _mean_of_pairs(within, rows) + _mean_of_pairs(within_real, real_rows) - 2 * cross

    everything = estimates(torch.ones(1, len(generated)).double(), torch.ones(1, len(real)).double())
    halves = estimates(
        _random_halves(len(generated), num_halves, keyed_generator(seed, "halves of generated")),
        _random_halves(len(real), num_halves, keyed_generator(seed, "halves of real")),
    )
    return KernelDistance(float(everything), halves)


def _kernel(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _mean_of_pairs(kernel: Float[Tensor, "n n"], rows: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
    """For each row of 0s and 1s the mean of the kernel over ordered pairs of two different chosen pictures."""
    chosen = rows.sum(1)
    return (((rows @ kernel) * rows).sum(1) - rows @ kernel.diag()) / (chosen * (chosen - 1))


def _random_halves(num: int, num_halves: int, generator: torch.Generator) -> Float[Tensor, "r n"]:
    order = torch.rand(num_halves, num, generator=generator).argsort(1)
    return torch.zeros(num_halves, num, dtype=torch.float64).scatter_(1, order[:, : num // 2], 1.0)
