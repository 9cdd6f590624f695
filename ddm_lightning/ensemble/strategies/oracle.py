"""``oracle``: one expert from noise to data, of a cluster that is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Batch, Strategy, choose
from ddm_lightning.flow.path import Samples, Times, VelocityField


@STRATEGIES.register("oracle")
@dataclass(frozen=True)
class Oracle(Strategy):
    """Follow one expert per sample (DDM, 2501.05450, table 3); for evaluation.

    The cluster is drawn from the partition's priors, which is exact without a condition. For samples of held-out
    conditions give their true cluster with ``cluster``.
    """

    needs_router = False
    cluster: int | None = None

    def check_num_clusters(self, num_clusters: int) -> None:
        """Refuse a ``cluster`` that does not exist."""
        if self.cluster is not None and not 0 <= self.cluster < num_clusters:
            raise UserError(f"strategy 'oracle': cluster = {self.cluster} is not from 0 to {num_clusters - 1}")

    def field(self, batch: Batch) -> VelocityField:
        """Velocity of each sample's own expert."""
        ensemble = batch.ensemble
        priors = ensemble.priors.to(ensemble.device)
        if self.cluster is not None:
            priors = torch.eye(ensemble.num_clusters, dtype=priors.dtype, device=priors.device)[self.cluster]
        weights = priors.expand(len(batch.x_1), -1)
        clusters = choose(weights, batch.uniform(0))

        def velocity(x_t: Samples, t: Times) -> Float[Tensor, "b c h w"]:
            result = torch.empty_like(x_t)
            for k in range(ensemble.num_clusters):
                rows = (clusters == k).nonzero().squeeze(1)
                if len(rows):
                    result[rows] = batch.expert_velocity(k, x_t[rows], t[rows], rows)
            return result

        return velocity
