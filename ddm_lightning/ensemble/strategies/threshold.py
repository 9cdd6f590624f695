"""``threshold``: every expert above a given probability."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Strategy


@STRATEGIES.register("threshold")
@dataclass(frozen=True)
class Threshold(Strategy):
    """Evaluate the experts with a probability of at least ``threshold``, or the most probable ones if none has it."""

    threshold: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold = {self.threshold} must be from 0 to 1")

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Set smaller probabilities to 0 and renormalise."""
        lowest = probabilities.amax(dim=1, keepdim=True).clamp_max(self.threshold)
        kept = probabilities.where(probabilities >= lowest, 0)
        return kept / kept.sum(dim=1, keepdim=True)
