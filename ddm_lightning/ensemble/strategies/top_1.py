"""``top-1``: the most probable expert alone."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Strategy, normalised


@STRATEGIES.register("top-1")
class Top1(Strategy):
    """Evaluate one expert per row and step, the paper's choice (DDM, 2501.05450)."""

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Give the most probable expert of each row weight 1."""
        return normalised(*probabilities.topk(1, dim=1), probabilities.shape[1])
