"""``top-p``: as few experts as hold a given share of the probability."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Strategy, normalised


@STRATEGIES.register("top-p")
@dataclass(frozen=True)
class TopP(Strategy):
    """Evaluate the most probable experts whose probabilities sum to at least ``p`` (nucleus sampling, 1904.09751)."""

    p: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"p = {self.p} must be above 0 and at most 1")

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Keep the smallest set of experts that reaches ``p`` in each row and renormalise."""
        shares, experts = probabilities.sort(dim=1, descending=True)
        before = shares.cumsum(dim=1) - shares
        return normalised(shares.where(before < self.p, 0), experts, probabilities.shape[1])
