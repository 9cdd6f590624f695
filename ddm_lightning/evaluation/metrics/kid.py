"""``kid``: kernel distance between the features of two sets of images (KID, 1801.01401).

Published KIDs use Inception features. Compare values only on the same features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import METRICS
from ddm_lightning.core.scores import Score
from ddm_lightning.evaluation.metrics._base import FeatureMetric
from ddm_lightning.flow.randomness import keyed_generator

NUM_HALVES = 200


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
    generated, real = generated.double().cpu(), real.double().cpu()
    within = _kernel(generated, generated)
    within_real = _kernel(real, real)
    across = _kernel(generated, real)

    def estimates(rows: Float[Tensor, "r n"], real_rows: Float[Tensor, "r m"]) -> Float[Tensor, " r"]:
        cross = ((rows @ across) * real_rows).sum(1) / (rows.sum(1) * real_rows.sum(1))
        return _mean_of_pairs(within, rows) + _mean_of_pairs(within_real, real_rows) - 2 * cross

    everything = estimates(torch.ones(1, len(generated)).double(), torch.ones(1, len(real)).double())
    halves = estimates(
        _random_halves(len(generated), num_halves, keyed_generator(seed, "halves of generated")),
        _random_halves(len(real), num_halves, keyed_generator(seed, "halves of real")),
    )
    return KernelDistance(float(everything), halves)


def mean_over_subsets(
    generated: Float[Tensor, "n d"], real: Float[Tensor, "m d"], num_subsets: int, max_size: int = 1000, seed: int = 0
) -> float:
    """Average the distance over random subsets, as published (clean-fid: 100 subsets of at most 1,000 images).

    Args:
        generated: features of the generated images.
        real: features of the real images.
        num_subsets: number of subsets.
        max_size: images of each set in a subset.
        seed: seed of the subsets.
    """
    size, values = min(len(generated), len(real), max_size), []
    for number in range(num_subsets):
        x, y = (
            features[torch.randperm(len(features), generator=keyed_generator(seed, "subset", name, number))[:size]]
            for name, features in (("generated", generated), ("real", real))
        )
        values.append(kernel_distance(x, y, num_halves=0).value)
    return sum(values) / len(values)


@METRICS.register("kid")
class KernelInceptionDistance(FeatureMetric):
    """``kernel_distance`` in torchmetrics' interface; ``compute`` returns a ``KernelDistance``.

    Args:
        num_halves: number of random halves for the spread.
        seed: seed of halves and subsets.
        num_subsets: takes the value from ``mean_over_subsets``, 100 in clean-fid; None compares all pairs.
        params: see ``FeatureMetric``.
    """

    higher_is_better = False

    def __init__(
        self, num_halves: int = NUM_HALVES, seed: int = 0, num_subsets: int | None = None, **params: Any
    ) -> None:
        if num_subsets is not None and num_subsets < 1:
            raise ValueError("num_subsets must be at least 1")
        super().__init__(**params)
        self.num_halves = num_halves
        self.seed = seed
        self.num_subsets = num_subsets

    def compute(self) -> KernelDistance:
        """Compare all generated with all real images; see ``kernel_distance``."""
        generated, real = self.kept()
        found = kernel_distance(generated, real, num_halves=self.num_halves, seed=self.seed)
        if self.num_subsets is None:
            return found
        return found._replace(value=mean_over_subsets(generated, real, self.num_subsets, seed=self.seed))

    def scores(self) -> dict[str, Score]:
        """Return the distance under its name."""
        found = self.compute()
        subsets = f", {self.num_subsets} subsets" if self.num_subsets else ""
        return {f"KID ({self.features}{subsets})": Score.of(found.value, found.spread)}


def _kernel(x: Float[Tensor, "n d"], y: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    return (x @ y.T / x.shape[1] + 1) ** 3


def _mean_of_pairs(kernel: Float[Tensor, "n n"], rows: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
    """Mean of the kernel over ordered pairs of different chosen images, for each row of 0s and 1s."""
    chosen = rows.sum(1)
    return (((rows @ kernel) * rows).sum(1) - rows @ kernel.diag()) / (chosen * (chosen - 1))


def _random_halves(num: int, num_halves: int, generator: torch.Generator) -> Float[Tensor, "r n"]:
    order = torch.rand(num_halves, num, generator=generator).argsort(1)
    return torch.zeros(num_halves, num, dtype=torch.float64).scatter_(1, order[:, : num // 2], 1.0)
