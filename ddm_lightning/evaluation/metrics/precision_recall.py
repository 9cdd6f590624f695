"""``precision-recall``: improved precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991)."""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from ddm_lightning.core.registry import METRICS
from ddm_lightning.core.scores import QUANTILE_95, Score
from ddm_lightning.evaluation.metrics._base import FeatureMetric, covered, nearest


class PrecisionRecall(NamedTuple):
    """Shares from 0 to 1."""

    precision: Score
    """Generated images among real ones."""
    recall: Score
    """Real images among generated ones."""


def precision_recall(
    generated: Float[Tensor, "n d"], real: Float[Tensor, "m d"], num_neighbours: int = 3
) -> PrecisionRecall:
    """Equations 1 and 2 of 1904.06991.

    A point is among a set if it is at most as far from one of its points as that point's k-th nearest neighbour in the
    set. Intervals count the judged images as drawn at random and the other set as given.
    """
    within_real = covered(generated, real, nearest(real, real, num_neighbours + 1)[0][:, -1])  # itself is the nearest
    within_generated = covered(real, generated, nearest(generated, generated, num_neighbours + 1)[0][:, -1])
    return PrecisionRecall(_share(within_real), _share(within_generated))


def _share(hits: Bool[Tensor, " n"]) -> Score:
    """Share of hits with Wilson's interval, which has a width also at 0 and 1."""
    num = len(hits)
    share = float(hits.double().mean())
    z_2 = QUANTILE_95**2
    middle = (share + z_2 / (2 * num)) / (1 + z_2 / num)
    reach = QUANTILE_95 / (1 + z_2 / num) * (share * (1 - share) / num + z_2 / (4 * num**2)) ** 0.5
    return Score(share, max(middle - reach, 0.0), min(middle + reach, 1.0))


@METRICS.register("precision-recall")
class PrecisionRecallMetric(FeatureMetric):
    """``precision_recall`` in torchmetrics' interface; ``compute`` returns a ``PrecisionRecall``.

    Compare sets of one size only: both shares depend on the numbers of images.

    Args:
        num_neighbours: k, 3 in the paper.
        params: see ``FeatureMetric``.
    """

    higher_is_better = True

    def __init__(self, num_neighbours: int = 3, **params: Any) -> None:
        super().__init__(**params)
        if num_neighbours < 1:
            raise ValueError(f"num_neighbours = {num_neighbours} must be at least 1")
        self.num_neighbours, self.min_images = num_neighbours, num_neighbours + 1

    def compute(self) -> PrecisionRecall:
        """Compare all generated with all real images."""
        return precision_recall(*self.kept(), self.num_neighbours)

    def scores(self) -> dict[str, Score]:
        """Return both shares under their names."""
        return {f"{name} ({self.features})": score for name, score in self.compute()._asdict().items()}
