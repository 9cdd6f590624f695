"""``sample-each-step``: an expert chosen at random at every step."""

from __future__ import annotations

from itertools import count

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Batch, Strategy, choose
from ddm_lightning.flow.path import VelocityField


@STRATEGIES.register("sample-each-step")
class SampleEachStep(Strategy):
    """Choose each step's expert with the router's probability (DDM, 2501.05450, table 3); a negative control.

    Its mean velocity is exact, but the noise of the choice accumulates along the trajectory.
    """

    # A velocity that changes at random has no error to control and none to extrapolate.
    solvers = ("euler", "ancestral", "heun", "midpoint")

    def field(self, batch: Batch) -> VelocityField:
        """Velocity of one expert per sample, chosen anew at every evaluation."""
        evaluations = count()

        def weights(probabilities: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
            chosen = choose(probabilities, batch.uniform(next(evaluations)))
            return functional.one_hot(chosen, probabilities.shape[1]) + 0 * probabilities  # NaN stays NaN

        return batch.field(route=weights)
