"""``top-k``: the k most probable experts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Strategy, normalised


@STRATEGIES.register("top-k")
@dataclass(frozen=True)
class TopK(Strategy):
    """Evaluate the ``top_k`` most probable experts, or all if there are fewer (DDM, 2501.05450)."""

    top_k: int = 2

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k = {self.top_k} keeps no expert")

    def check_num_clusters(self, num_clusters: int) -> None:
        """Refuse a ``top_k`` above K."""
        if self.top_k > num_clusters:
            problem = f"top_k = {self.top_k} exceeds prepare.partition.num_clusters = {num_clusters}"
            raise UserError(f"sample.strategy_params.{problem}; set it to at most {num_clusters}")

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Keep the ``top_k`` largest probabilities of each row and renormalise."""
        num_clusters = probabilities.shape[1]
        shares, experts = probabilities.topk(min(self.top_k, num_clusters), dim=1)
        return normalised(shares, experts, num_clusters)
