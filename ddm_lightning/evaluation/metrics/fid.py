"""``fid``: Fréchet distance between Gaussians fitted to the features of two sets of images (FID, 1706.08500).

It is called FID on Inception features and FD on all others.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import METRICS
from ddm_lightning.core.scores import Score
from ddm_lightning.evaluation.metrics._base import FeatureMetric


class Moments(NamedTuple):
    """Sums over features, in float64; sums of parts add up to those of the whole."""

    num: Tensor
    total: Float[Tensor, " d"]
    outer: Float[Tensor, "d d"]

    @classmethod
    def of(cls, features: Float[Tensor, "n d"]) -> Moments:
        """Sum up features."""
        features = features.double()
        num = torch.tensor(float(len(features)), dtype=torch.float64, device=features.device)
        return cls(num, features.sum(0), features.T @ features)

    def without(self, features: Float[Tensor, "n d"]) -> Moments:
        """Return the sums without some of the features."""
        return Moments(*(whole - part for whole, part in zip(self, Moments.of(features), strict=True)))

    def mean_and_covariance(self) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
        """Return the mean and the unbiased covariance."""
        mean = self.total / self.num
        return mean, (self.outer - self.num * torch.outer(mean, mean)) / (self.num - 1)


def frechet_distance(generated: Moments, real: Moments) -> float:
    """``|μ_g − μ_r|² + tr(S_g + S_r − 2 (S_r^½ S_g S_r^½)^½)`` (equation 6 of 1706.08500).

    The last trace is the sum of roots of the eigenvalues, clipped at 0, of a symmetric matrix. So it is finite for
    covariances of any rank.
    """
    (mean, covariance), (real_mean, real_covariance) = generated.mean_and_covariance(), real.mean_and_covariance()
    values, vectors = torch.linalg.eigh(real_covariance)
    root = vectors * values.clamp_min(0).sqrt()  # root · rootᵀ = S_r; any such root gives the same eigenvalues
    shared = torch.linalg.eigvalsh(root.T @ covariance @ root).clamp_min(0).sqrt().sum()
    distance = (mean - real_mean).square().sum() + covariance.trace() + real_covariance.trace() - 2 * shared
    return float(distance)


@METRICS.register("fid")
class FrechetDistance(FeatureMetric):
    """``frechet_distance`` in torchmetrics' interface; ``compute`` returns a ``Score``.

    The interval is a delete-a-group jackknife's over both sets. On Gaussians its width was 0.95 to 1.4 times the true
    one, the bootstrap's 1.1 to 2.1 times, most with fewer images than features.

    Args:
        num_groups: groups of the jackknife; 0 gives no interval and keeps no features.
        min_images: fewest images of each set; with fewer, the bias exceeds most differences of interest.
        params: see ``FeatureMetric``. ``features`` are ``inception`` for FID, ``dinov2`` for FD-DINOv2, ``clip`` for
            CLIP-FID.
    """

    higher_is_better = False
    remedy = "use kid, which is unbiased, enlarge {few}, or lower the metric's min_images"

    def __init__(self, num_groups: int = 20, min_images: int = 2000, **params: Any) -> None:
        super().__init__(keeps_features=num_groups > 0, **params)
        self.num_groups, self.min_images = num_groups, min_images
        for side in ("generated", "real"):
            for name in Moments._fields:
                self.add_state(f"{side}_{name}", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def add(self, features: Float[Tensor, "n d"], real: bool) -> None:
        """Add features to the sums."""
        super().add(features, real)
        side = "real" if real else "generated"
        for name, value in Moments.of(features)._asdict().items():
            setattr(self, f"{side}_{name}", getattr(self, f"{side}_{name}") + value)

    def compute(self) -> Score:
        """Compare all generated with all real images."""
        names = [[f"{side}_{name}" for name in Moments._fields] for side in ("generated", "real")]
        sums = [Moments(*(getattr(self, name) for name in of_side)) for of_side in names]
        value, num = frechet_distance(*sums), self.num_groups
        if not num:
            return Score(value)
        sets = list(zip(sums, self.kept(), strict=True))
        # A group is every num-th image, because images of a cluster follow one another.
        left_out = [frechet_distance(*(whole.without(rows[j::num]) for whole, rows in sets)) for j in range(num)]
        return Score.of(value, float(((num - 1) * torch.tensor(left_out).var(correction=0)).sqrt()))

    def scores(self) -> dict[str, Score]:
        """Return the distance under its name."""
        return {f"{'FID' if self.features == 'inception' else 'FD'} ({self.features})": self.compute()}
