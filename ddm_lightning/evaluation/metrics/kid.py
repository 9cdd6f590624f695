"""``kid``: kernel distance between two sets of images (KID, 1801.01401) on EfficientNet-Lite0 features.

Published KIDs use Inception features. Compare values of this file only with each other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ddm_lightning.core.registry import FEATURES, METRICS
from ddm_lightning.flow.randomness import keyed_generator

FEATURE_NETWORK = "efficientnet-lite0"
RESOLUTION = 112
NUM_HALVES = 200


def image_features(images: UInt8[np.ndarray, "n h w 3"], device: str = "cpu") -> Float[Tensor, "n d"]:
    """Compute the features by which images are compared.

    Raises:
        UserError: the package with the weights is not installed.
    """
    network = FEATURES.build(FEATURE_NETWORK, {"resolution": RESOLUTION, "device": device})
    return torch.from_numpy(network.encode(images))


class KernelDistance(NamedTuple):
    """An estimate with its uncertainty."""

    value: float
    """Unbiased estimate over all pairs; may be slightly negative."""
    halves: Float[Tensor, " num_halves"]
    """The same estimate on random halves of both sets."""

    @property
    def spread(self) -> float:
        """Standard error of ``value``.

        The mean over a random half, taken without replacement, varies about the mean over all samples as much as
        that mean varies about the truth. To first order, a kernel distance is such a mean.
        """
        return float(self.halves.std())

    def minus(self, other: KernelDistance) -> tuple[float, float]:
        """Difference and its standard error, without the variance that both share through the real images.

        Both must come from the same real images, seed and numbers of images.
        """
        return self.value - other.value, float((self.halves - other.halves).std())


def kernel_distance(
    generated: Float[Tensor, "n d"], real: Float[Tensor, "m d"], *, num_halves: int = NUM_HALVES, seed: int = 0
) -> KernelDistance:
    """Squared maximum mean discrepancy with the kernel (x·y/d + 1)³; all pairs, unbiased, float64.

    Equation 4 of 1801.01401. The published protocol averages it over subsets of 1,000 images; a few hundred held-out
    images do not allow that, and all pairs make it unnecessary. Memory: (n + m)² numbers.

    Args:
        generated: features of the generated images.
        real: features of the real images.
        num_halves: number of random halves for the spread.
        seed: seed of the halves; use one seed for sets to be compared.

    Raises:
        ValueError: fewer than four images in a set, or features of different sizes.
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


@METRICS.register("kid")
class KernelInceptionDistance(Metric):
    """``kernel_distance`` in torchmetrics' interface; ``compute`` returns a ``KernelDistance``.

    Args:
        num_halves: number of random halves for the spread.
        seed: seed of the halves.
    """

    full_state_update = False
    higher_is_better = False
    real: list[Tensor]
    generated: list[Tensor]

    def __init__(self, num_halves: int = NUM_HALVES, seed: int = 0) -> None:
        super().__init__()
        self.num_halves, self.seed = num_halves, seed
        self.add_state("real", [], dist_reduce_fx="cat")
        self.add_state("generated", [], dist_reduce_fx="cat")

    def update(self, images: UInt8[np.ndarray, "n h w 3"] | Float[Tensor, "n d"], *, real: bool) -> None:
        """Add images, or features that ``image_features`` computed earlier."""
        features = images if isinstance(images, Tensor) else image_features(images, str(self.device))
        (self.real if real else self.generated).append(features)

    def compute(self) -> KernelDistance:
        """Compare all generated with all real images; see ``kernel_distance``."""
        generated, real = dim_zero_cat(self.generated), dim_zero_cat(self.real)
        return kernel_distance(generated, real, num_halves=self.num_halves, seed=self.seed)


def _kernel(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _mean_of_pairs(kernel: Float[Tensor, "n n"], rows: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
    """Mean of the kernel over ordered pairs of different chosen images, for each row of 0s and 1s."""
    chosen = rows.sum(1)
    return (((rows @ kernel) * rows).sum(1) - rows @ kernel.diag()) / (chosen * (chosen - 1))


def _random_halves(num: int, num_halves: int, generator: torch.Generator) -> Float[Tensor, "r n"]:
    order = torch.rand(num_halves, num, generator=generator).argsort(1)
    return torch.zeros(num_halves, num, dtype=torch.float64).scatter_(1, order[:, : num // 2], 1.0)
