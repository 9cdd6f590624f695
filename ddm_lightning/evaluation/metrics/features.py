"""Metrics that compare the features of generated and real images: ``kid``, ``fid``, ``precision-recall``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import FEATURES, METRICS, parameters_of
from ddm_lightning.encoders.interfaces import Features
from ddm_lightning.flow.randomness import keyed_generator

DEFAULT = "efficientnet-lite0"
"""Feature network."""
Rows: TypeAlias = Float[Tensor, "n d"]
"""Features of n images."""
Others: TypeAlias = Float[Tensor, "m d"]
"""Features of m other images."""
NUM_HALVES = 200
_ROWS_AT_ONCE = 1024
_BLOCK = 1 << 25


class Score(NamedTuple):
    """A value and the limits of its 95 % interval; None where a metric gives no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, value: float, error: float) -> Score:
        """Make a score from its standard error."""
        return cls(value, value - 1.96 * error, value + 1.96 * error)


@dataclass(eq=False)
class FeatureMetric:
    """Base of the metrics that compare the features of all generated with those of all real images.

    Args:
        features: feature network, by name.
        features_params: its parameters, such as ``path``.
    """

    features: str = DEFAULT
    features_params: dict[str, Any] = field(default_factory=dict)
    device = torch.device("cpu")
    min_images = 4
    """Fewest images of each set."""
    remedy = "enlarge evaluate.num_images or the reference (evaluate.reference=train)"
    """Advice if there are fewer."""

    def __post_init__(self) -> None:
        FEATURES.check(self.features, self.features_params)

    @cached_property
    def network(self) -> Features:
        """The feature network, on the metric's device.

        Raises:
            UserError: its weights are missing.
        """
        params = dict(self.features_params)
        if "device" in parameters_of(FEATURES.get(self.features)):
            params.setdefault("device", str(self.device))

        return FEATURES.build(self.features, params)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Name, parameters and files that determine the features."""
        return {"name": self.features, "params": self.features_params, **self.network.provenance()}

    def to(self, device: torch.device) -> FeatureMetric:
        """Choose the device of the network and of the features."""
        self.device = device
        return self

    def scores(self, generated: Rows, real: Others) -> dict[str, Score]:
        """Return the values by their reported names, which include that of the features."""
        raise NotImplementedError

    def check_nums(self, name: str, num_generated: int, num_real: int) -> None:
        """Check that there are enough images.

        Raises:
            UserError: naming the metric ``name`` and what to do.
        """
        if min(num_generated, num_real) < self.min_images:
            raise UserError(
                f"metric {name!r} needs {self.min_images:,} images of each kind, not {num_generated:,} samples, "
                f"{num_real:,} real; {self.remedy}"
            )


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


def kernel_distance(generated: Rows, real: Others, num_halves: int = NUM_HALVES) -> KernelDistance:
    """Squared maximum mean discrepancy with the kernel (x·y/d + 1)³; all pairs, unbiased, float64.

    Equation 4 of 1801.01401. The published protocol averages it over subsets of 1,000 images; a few hundred held-out
    images do not allow that, and all pairs make it unnecessary. Sets of one size are always halved alike, so that they
    can be compared.

    Args:
        generated: features of at least four generated images.
        real: features of at least four real images.
        num_halves: number of random halves for the spread.
    """
    generated = generated.double().cpu()
    real = real.double().cpu()
    rows = _all_and_halves(len(generated), num_halves, keyed_generator(0, "halves of generated"))
    real_rows = _all_and_halves(len(real), num_halves, keyed_generator(0, "halves of real"))
    num_pairs = rows.sum(1) * real_rows.sum(1)
    across = _sum_of_pairs(generated, real, rows, real_rows) / num_pairs
    found = _mean_of_pairs(generated, rows) + _mean_of_pairs(real, real_rows) - 2 * across
    return KernelDistance(float(found[0]), found[1:])


def _sum_of_pairs(
    x: Rows, y: Others, rows: Float[Tensor, "r n"], other_rows: Float[Tensor, "r m"]
) -> Float[Tensor, " r"]:
    """Sum of the kernel over all pairs of chosen images, for each two rows of 0s and 1s; in blocks of 256 MB."""
    size = max(1, _BLOCK // len(y))
    sums = []
    for part, own in zip(x.split(size), rows.split(size, 1), strict=True):
        products = own @ (part @ y.T / x.shape[1] + 1) ** 3
        sums.append((products * other_rows).sum(1))

    return torch.stack(sums).sum(0)


def _mean_of_pairs(x: Rows, rows: Float[Tensor, "r n"]) -> Float[Tensor, " r"]:
    """Mean of the kernel over ordered pairs of different chosen images, for each row of 0s and 1s."""
    chosen = rows.sum(1)
    own = (x.square().sum(1) / x.shape[1] + 1) ** 3
    return (_sum_of_pairs(x, x, rows, rows) - rows @ own) / (chosen * (chosen - 1))


def _all_and_halves(num: int, num_halves: int, generator: torch.Generator) -> Float[Tensor, "r n"]:
    """A row of 1s, and rows with 1s at a random half of the places."""
    order = torch.rand(num_halves, num, generator=generator).argsort(1)
    rows = torch.zeros(1 + num_halves, num, dtype=torch.float64)
    rows[0] = 1.0
    rows[1:].scatter_(1, order[:, : num // 2], 1.0)
    return rows


def mean_over_subsets(generated: Rows, real: Others, num_subsets: int, max_size: int = 1000) -> float:
    """Average the distance over random subsets, as published (clean-fid: 100 subsets of at most 1,000 images)."""
    size = min(len(generated), len(real), max_size)

    def subset(name: str, features: Tensor, number: int) -> Tensor:
        order = torch.randperm(len(features), generator=keyed_generator(0, "subset", name, number))
        return features[order[:size]]

    total = 0.0
    for number in range(num_subsets):
        chosen = subset("generated", generated, number)
        total += kernel_distance(chosen, subset("real", real, number), num_halves=0).value

    return total / num_subsets


@METRICS.register("kid")
@dataclass(eq=False)
class KernelInceptionDistance(FeatureMetric):
    """``kernel_distance`` (KID, 1801.01401).

    Published KIDs use Inception features. Compare values only on the same features.

    Args:
        features: see ``FeatureMetric``.
        features_params: see ``FeatureMetric``.
        num_subsets: number of subsets for ``mean_over_subsets``, 100 in clean-fid; None compares all pairs.
    """

    num_subsets: int | None = None

    def scores(self, generated: Rows, real: Others) -> dict[str, Score]:
        """Return the distance under its name."""
        found = kernel_distance(generated, real)
        name = self.features
        value = found.value
        if self.num_subsets:
            name += f", {self.num_subsets} subsets"
            value = mean_over_subsets(generated, real, self.num_subsets)

        return {f"KID ({name})": Score.of(value, found.spread)}


def _sums(features: Rows) -> Float[Tensor, "d1 d1"]:
    """``XᵀX`` in float64, X with a column of ones: sums of products, of features and of rows. Those of parts add up."""
    rows = F.pad(features, (0, 1), value=1.0).double()
    return rows.T @ rows


def _gaussian(sums: Float[Tensor, "d1 d1"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Mean and unbiased covariance."""
    num = sums[-1, -1]
    mean = sums[-1, :-1] / num
    scatter = sums[:-1, :-1] - num * torch.outer(mean, mean)
    return mean, scatter / (num - 1)


def _frechet_distance(generated: Float[Tensor, "d1 d1"], real: Float[Tensor, "d1 d1"]) -> float:
    """``|μ_g − μ_r|² + tr(S_g + S_r − 2 (S_r^½ S_g S_r^½)^½)`` (equation 6 of 1706.08500).

    Of the ``_sums`` of two sets. The last trace is the sum of the square roots of a symmetric matrix's eigenvalues,
    clipped at 0. So it is finite for covariances of any rank.
    """
    mean, covariance = _gaussian(generated)
    real_mean, real_covariance = _gaussian(real)
    values, vectors = torch.linalg.eigh(real_covariance)
    root = vectors * values.clamp_min(0).sqrt()  # root · rootᵀ = S_r; any such root gives the same eigenvalues
    shared = torch.linalg.eigvalsh(root.T @ covariance @ root).clamp_min(0)
    distance = (mean - real_mean).square().sum()
    return float(distance + covariance.trace() + real_covariance.trace() - 2 * shared.sqrt().sum())


@METRICS.register("fid")
@dataclass(eq=False)
class FrechetDistance(FeatureMetric):
    """Fréchet distance between Gaussians fitted to both sets.

    It is called FID on Inception features and FD on all others. The interval comes from a delete-a-group jackknife over
    both sets. On Gaussians its width was 0.95 to 1.4 times the true one. A bootstrap's was 1.1 to 2.1 times, the most
    with fewer images than features.

    Args:
        features: ``inception`` for FID, ``dinov2`` for FD-DINOv2, ``clip`` for CLIP-FID.
        features_params: see ``FeatureMetric``.
        num_groups: groups of the jackknife; 0 gives no interval.
        min_images: fewest images of each set; with fewer, the bias exceeds most differences of interest.
    """

    num_groups: int = 20
    min_images: int = 2000
    remedy = f"use kid, which is unbiased, {FeatureMetric.remedy}, or lower the metric's min_images"

    def scores(self, generated: Rows, real: Others) -> dict[str, Score]:
        """Return the distance under its name."""
        sums = _sums(generated)
        real_sums = _sums(real)
        score = Score(_frechet_distance(sums, real_sums))
        num = self.num_groups
        if num:
            # A group is every num-th image, because images of a cluster follow one another.
            left_out = []
            for j in range(num):
                rest = sums - _sums(generated[j::num])
                left_out.append(_frechet_distance(rest, real_sums - _sums(real[j::num])))

            variance = (num - 1) * torch.tensor(left_out).var(correction=0)
            score = Score.of(score.value, float(variance.sqrt()))

        name = "FID" if self.features == "inception" else "FD"
        return {f"{name} ({self.features})": score}


def precision_recall(generated: Rows, real: Others, num_neighbours: int = 3) -> dict[str, Score]:
    """Share of generated images among the real ones (``precision``), and of real among generated ones (``recall``).

    Equations 1 and 2 of 1904.06991. A point is among a set if it is no farther from some point of the set than that
    point's k-th nearest neighbour there. Intervals treat the judged images as drawn at random and the other set as
    fixed.
    """
    radii, _ = nearest(real, real, num_neighbours + 1)  # itself is the nearest
    own_radii, _ = nearest(generated, generated, num_neighbours + 1)
    within_real = covered(generated, real, radii[:, -1])
    within_generated = covered(real, generated, own_radii[:, -1])
    return {"precision": _share(within_real), "recall": _share(within_generated)}


def _share(hits: Bool[Tensor, " n"]) -> Score:
    """Share of hits with Wilson's interval, which has a width at 0 and 1, too."""
    from scipy.stats import binomtest

    found = binomtest(int(hits.sum()), len(hits))
    return Score(found.statistic, *found.proportion_ci(method="wilson"))


@METRICS.register("precision-recall")
@dataclass(eq=False)
class PrecisionRecallMetric(FeatureMetric):
    """``precision_recall`` (Kynkäänniemi et al. 2019, 1904.06991).

    Compare sets of one size only: both shares depend on the numbers of images.

    Args:
        features: see ``FeatureMetric``.
        features_params: see ``FeatureMetric``.
        num_neighbours: k, 3 in the paper.
    """

    num_neighbours: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.min_images = self.num_neighbours + 1

    def scores(self, generated: Rows, real: Others) -> dict[str, Score]:
        """Return both shares under their names."""
        found = precision_recall(generated, real, self.num_neighbours)
        return {f"{name} ({self.features})": score for name, score in found.items()}


def nearest(rows: Rows, others: Others, num: int) -> tuple[Float[Tensor, "n num"], Int[Tensor, "n num"]]:
    """Return the ascending distances (float64) to the ``num`` nearest of ``others``, or to all, and their indices."""
    num = min(num, len(others))
    distances = []
    indices = []
    for part in rows.double().split(_ROWS_AT_ONCE):
        found = torch.cdist(part, others.double()).topk(num, largest=False)
        distances.append(found.values)
        indices.append(found.indices)

    return torch.cat(distances), torch.cat(indices)


def covered(rows: Rows, centres: Others, radii: Float[Tensor, " m"]) -> Bool[Tensor, " n"]:
    """Whether each row lies within the ball of any centre."""
    found = []
    for part in rows.double().split(_ROWS_AT_ONCE):
        is_within = torch.cdist(part, centres.double()) <= radii
        found.append(is_within.any(1))

    return torch.cat(found)
