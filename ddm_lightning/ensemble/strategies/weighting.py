"""Strategies that only weight the experts by the router's probabilities: all of them, or the most probable."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Strategy, normalised


@STRATEGIES.register("full")
class Full(Strategy):
    """Evaluate all K experts: the exact mixture (DDM, 2501.05450)."""

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Return the probabilities themselves."""
        return probabilities


@STRATEGIES.register("top-1")
class Top1(Strategy):
    """Evaluate one expert per row and step, the paper's choice (DDM, 2501.05450)."""

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Give the most probable expert of each row weight 1."""
        return normalised(*probabilities.topk(1, dim=1), probabilities.shape[1])


@STRATEGIES.register("top-k")
@dataclass(frozen=True)
class TopK(Strategy):
    """Evaluate the ``top_k`` most probable experts, or all if there are fewer (DDM, 2501.05450)."""

    top_k: int = 2

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k} keeps no expert")

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Keep the ``top_k`` largest probabilities of each row and renormalise."""
        num_clusters = probabilities.shape[1]
        shares, experts = probabilities.topk(min(self.top_k, num_clusters), dim=1)
        return normalised(shares, experts, num_clusters)


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
