"""``uniform``: all experts alike, as a control of what the router is worth."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Strategy


@STRATEGIES.register("uniform")
class Uniform(Strategy):
    """Evaluate all K experts and average their velocities, whatever the router says."""

    def weights(self, probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
        """Give each expert weight 1/K."""
        return torch.full_like(probabilities, 1 / probabilities.shape[1])
