"""``oracle``: one expert from noise to data, of a cluster that is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Batch, Strategy, choose
from ddm_lightning.flow.path import VelocityField


@STRATEGIES.register("oracle")
@dataclass(frozen=True)
class Oracle(Strategy):
    """Follow one expert per sample (DDM, 2501.05450, table 3); for evaluation.

    The cluster is drawn from the partition's priors, which is exact without a condition. For samples of held-out
    conditions give their true cluster with ``cluster``.
    """

    needs_router = False
    cluster: int | None = None

    def field(self, batch: Batch) -> VelocityField:
        """Velocity of each sample's own expert.

        Raises:
            UserError: ``cluster`` has no expert in the ensemble.
        """
        priors, num_clusters = batch.ensemble.priors.to(batch.x_1.device), batch.ensemble.num_clusters
        if self.cluster is None:
            clusters = choose(priors.expand(len(batch.x_1), -1), batch.uniform(0))
        else:
            names, name = batch.ensemble.names, f"expert-{self.cluster}"
            if name not in names:
                raise UserError(
                    f"strategy 'oracle': cluster = {self.cluster} has no expert here; choose one of {', '.join(names)}"
                )
            clusters = torch.full((len(batch.x_1),), names.index(name), device=batch.x_1.device)
        return batch.field(weights=functional.one_hot(clusters, num_clusters).to(batch.x_1))
