"""All strategies except ``bayes``: they weight experts by the router's probabilities, or choose one for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Batch, Images, Strategy, choose, normalised
from ddm_lightning.ensemble.velocity import Weights
from ddm_lightning.flow.path import VelocityField, time_rows
from ddm_lightning.flow.solvers import Solver


@STRATEGIES.register("full")
class Full(Strategy):
    """Evaluate all K experts: the exact mixture (DDM, 2501.05450)."""

    def weights(self, probabilities: Weights) -> Weights:
        """Return the probabilities themselves."""
        return probabilities


@STRATEGIES.register("top-1")
class Top1(Strategy):
    """Evaluate one expert per row and step, the paper's choice (DDM, 2501.05450)."""

    def weights(self, probabilities: Weights) -> Weights:
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

    def weights(self, probabilities: Weights) -> Weights:
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

    def weights(self, probabilities: Weights) -> Weights:
        """Keep the smallest set of experts that reaches ``p`` in each row and renormalise."""
        shares, experts = probabilities.sort(dim=1, descending=True)
        before = shares.cumsum(dim=1) - shares
        return normalised(shares.where(before < self.p, 0), experts, probabilities.shape[1])


@STRATEGIES.register("threshold")
@dataclass(frozen=True)
class Threshold(Strategy):
    """Evaluate the experts with a probability of at least ``threshold``, or the most probable ones if none has it."""

    threshold: float = 0.1

    def weights(self, probabilities: Weights) -> Weights:
        """Set smaller probabilities to 0 and renormalise."""
        lowest = probabilities.amax(dim=1, keepdim=True).clamp_max(self.threshold)
        kept = probabilities.where(probabilities >= lowest, 0)
        return kept / kept.sum(dim=1, keepdim=True)


@STRATEGIES.register("sample-1")
@dataclass(frozen=True)
class Sample1(Strategy):
    """Draw one expert from p(k | x_1, t = 1, condition) and follow it; draw again where the router is unsure.

    This keeps the clusters' shares. Let p_t(x, k) be the joint law of x_t and the cluster k of its x_0. Expert k moves
    x_t along its own flow, which turns p_t(x, k) into p_s(x, k). A new draw from the router's p(k | x_s) leaves
    p_s(x, k) as it is, for any set of x_s on which it is made. So exact experts sample the mixture for every
    ``threshold``, up to the solver's error. ``top-1`` does not: at high noise it gives all samples to the largest
    cluster. Following the *change* of the router's probabilities (a maximal coupling from one step to the next) does
    not either: x_t has moved because of k, so its evidence would count twice.

    If the router knows less about x_t than the experts do, a further draw may lead to another mode. So by default there
    is one draw.

    Args:
        threshold: draw again at each step at which no expert has this probability. 0 draws once: from the router at
            t = 1 or, without one, from the priors. 1 draws at each step.
    """

    needs_router = False
    threshold: float = 0.0

    def generate(self, batch: Batch, times: Float[Tensor, " num_times"], solver: Solver) -> Images:
        """Go from ``batch.x_1`` to x_0 with one expert per sample; with a threshold, solve each step on its own."""
        x_t = batch.x_1
        num_clusters = batch.ensemble.num_clusters
        experts = choose(batch.initial_weights()[: len(x_t)], batch.uniform(0))
        if not self.threshold:
            velocity = batch.field(weights=one_hot(experts, num_clusters).to(x_t))
            return solver.solve(velocity, x_t, times, batch.noise, batch.on_step)

        for step in range(len(times) - 1):
            if step:
                t = time_rows(float(times[step]), x_t)
                weights = batch.probabilities(x_t, t)[: len(x_t)]
                unsure = weights.amax(1) < self.threshold
                experts = torch.where(unsure, choose(weights, batch.uniform(step)), experts)

            velocity = batch.field(weights=one_hot(experts, num_clusters).to(x_t))
            ends = times[step : step + 2]
            # For the solver, it is the first step.
            x_t = solver.solve(velocity, x_t, ends, lambda _, step=step: batch.noise(step))  # type: ignore[misc]
            x_t = batch.on_step(step, float(times[step + 1]), x_t)

        return x_t


@STRATEGIES.register("oracle")
@dataclass(frozen=True)
class Oracle(Strategy):
    """Follow one expert per sample (DDM, 2501.05450, table 3); for evaluation.

    The expert is that of ``cluster``. Without it, ``evaluate``, ``diagnose`` and the benchmarks give the cluster of the
    image that each held-out condition describes; others choose one from p(k | class), or from the priors without
    classes. From an image, they choose one by the router.
    """

    needs_router = False
    cluster: int | None = None

    def field(self, batch: Batch) -> VelocityField:
        """Velocity of each sample's own expert.

        Raises:
            UserError: a cluster has no expert in the ensemble.
        """
        num = len(batch.x_1)
        clusters = batch.clusters
        if self.cluster is not None:
            clusters = torch.full((num,), self.cluster)

        if clusters is None:
            # At t = 1 the router would have nothing to read.
            initial = batch.initial_weights(use_router=batch.image is not None)
            places = choose(initial[:num], batch.uniform(0))
        else:
            places = _places(clusters.tolist(), batch.ensemble.clusters).to(batch.x_1.device)

        return batch.field(weights=one_hot(places, batch.ensemble.num_clusters).to(batch.x_1))


def _places(clusters: list[int], known: list[int]) -> Int[Tensor, " b"]:
    for cluster in clusters:
        if cluster not in known:
            numbers = ", ".join(map(str, known))
            raise UserError(f"strategy 'oracle': cluster = {cluster} has no expert here; choose one of {numbers}")

    return torch.tensor([known.index(cluster) for cluster in clusters])


@STRATEGIES.register("sample-each-step")
class SampleEachStep(Strategy):
    """Choose each step's expert with the router's probability (DDM, 2501.05450, table 3); a negative control.

    Its mean velocity is exact, but the noise of the choice accumulates along the trajectory.
    """

    # The velocity changes at random, so other solvers would adapt to noise, or extrapolate it.
    solvers = ("euler", "ancestral", "heun", "midpoint")

    def field(self, batch: Batch) -> VelocityField:
        """Velocity of one expert per sample, chosen anew at every evaluation."""
        evaluations = count()

        def weights(probabilities: Weights) -> Weights:
            chosen = choose(probabilities, batch.uniform(next(evaluations)))
            return one_hot(chosen, probabilities.shape[1]) + 0 * probabilities  # NaN stays NaN

        return batch.field(route=weights)
