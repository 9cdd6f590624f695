"""``full``: every expert, weighted by the router's probabilities."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Strategy


@STRATEGIES.register("full")
class Full(Strategy):
    """Evaluate all K experts: the exact mixture (DDM, 2501.05450)."""

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Return the probabilities themselves."""
        return probabilities
