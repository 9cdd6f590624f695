"""``bayes``: no router; along a stochastic reverse chain the cluster posterior is a Bayesian filter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Batch, BranchWeights, Images, Strategy, choose, mixture
from ddm_lightning.flow.path import expand_rows, time_rows
from ddm_lightning.flow.solvers import Solver
from ddm_lightning.flow.solvers.built_in import reverse_kernel
from ddm_lightning.flow.timesteps import intervals

MIN_WEIGHT = 1e-4
"""An expert whose weight falls below this is dropped from the row for the rest of the chain."""


@STRATEGIES.register("bayes")
@dataclass(frozen=True)
class Bayes(Strategy):
    """Sample from the mixture of experts and filter the cluster posterior along the chain.

    Expert k steps by the kernel q_k(x_s | x_t) = N(μ_k, σ²I) of ``reverse_kernel``, with its own estimate of x_0.
    The mixture's kernel is Σ_k w_k q_k with w_k = p(k | x_t). A step draws k ~ w, then x_s ~ q_k; by Bayes' rule
    p(k | x_s) ∝ w_k · q_k(x_s | x_t). The last step, to s = 0, takes the chosen expert's estimate of x_0.

    The only approximation: the true kernel is Gaussian only in the limit of small steps. With exact experts, four
    unequal 2-D clusters and 20 steps, the mean total variation between w and the exact posterior is 0.001 over all
    steps and at most 0.005 at the worst one. It grows as clusters overlap.

    With a condition, the partition's priors are not p(k | condition). ``router_prior`` therefore starts the filter
    from the router's p(k | x_1, t = 1, condition) if there is a router. Otherwise it starts from p(k | class), which is
    exact; under captions, from the priors, which is wrong.

    Guidance inside each expert guides μ_k. Then the chain has the law of choosing k by the initial weights once and
    following the guided expert k to the end, and w is its exact posterior p(k | x_1 … x_t), which is proportional to
    ``initial_k · Π q_k(x_s | x_t)``. So the clusters' shares are those of the initial weights.

    Guidance of the mixture filters two sets of weights along the one chain, p(k | x_t, c) and p(k | x_t). Both are
    posteriors of the data, whatever law the chain has, because the same update holds for any x_t and x_s:
    p_s(x_s | k) / p_t(x_t | k) = q_k(x_s | x_t) / p(x_t | x_s), and the last denominator is the same for all k.
    A step draws k from the first set and adds to its mean
    ``(scale - 1)·(Σ_k p(k | x_t, c)·μ_k(c) - Σ_k p(k | x_t)·μ_k)``. In the limit of small steps this is the chain of
    one guided model of all data. Below the guidance interval, weights without the condition no longer change.

    From an image, the filter starts from the router's p(k | x_t, t, condition) of the noisy image. Without a router it
    runs from t = 1 down to the noisy image on a chain of known steps, x_s ~ q(x_s | x_t, image), without guidance. By
    the same identity this gives p(k | x_t, condition). The steps cost what free ones do, and the noisy image is the
    chain's, with other noise than in other strategies.

    This is a discrete-time relative of SuperDiff's density-weighted OR (2412.17762), with priors and pruning.
    Cooperative sampling from a mixture of decentralized diffusion models (OpenReview 1GCWcrZTX8) mixes experts by
    Langevin steps, also without a router.
    """

    needs_router = False
    solvers = ("ancestral",)
    router_prior: bool = True

    @torch.no_grad()
    def generate(self, batch: Batch, times: Float[Tensor, " num_times"], solver: Solver) -> Images:
        """Run the filter from ``batch.x_1``, or to and from the noisy image."""
        x_t = batch.x_1
        num_known = 0
        use_router = self.router_prior
        image = batch.image
        if image is not None and not (use_router and batch.ensemble.router is not None):
            use_router = False
            x_t = batch.noise_1
            num_known = len(batch.skipped_times) - 1
            times = torch.cat([times.new_tensor(batch.skipped_times[:-1]), times])

        num = len(x_t)
        rows = torch.arange(num, device=x_t.device)
        low, _ = batch.settings.guidance_interval
        # Logarithms, because likelihoods of many pixels underflow; float64, because their ratios are small differences.
        initial = batch.initial_weights(use_router=use_router)
        log_weights = _pruned(initial.to(x_t.device, torch.float64).log())
        for i, (t, s) in enumerate(intervals(times)):
            weights = log_weights.exp()
            active = weights > 0
            if t < low:
                active[num:] = False  # no later step needs the unconditional branch

            time = time_rows(t, x_t)
            found = batch.expert_velocities(x_t, time, active)
            if batch.trace is not None:
                batch.record(x_t, time, weights[:num], batch.mixed(time, weights, found))

            x = torch.cat([x_t] * batch.num_branches)[:, None]
            means, variance = reverse_kernel(x.expand_as(found), x - t * found, t, s)
            x_s = means[rows, choose(weights[:num], batch.uniform(i))]
            if image is not None and i < num_known:
                x_s, _ = reverse_kernel(x_t, image, t, s)
            elif batch.num_branches == 2:
                conditional, unconditional = mixture(weights, means).chunk(2)
                scale = expand_rows(batch.guidance_scale(time), x_s)
                x_s = x_s + (scale - 1) * (conditional - unconditional)

            if s > 0:
                x_s = x_s + (variance.sqrt() * batch.noise(i)).to(x_s.dtype)
            if i >= num_known:
                x_s = batch.on_step(i - num_known, s, x_s)
            if s > 0:
                differences = torch.cat([x_s] * batch.num_branches)[:, None] - means
                squares = differences.flatten(2).square().sum(dim=2, dtype=torch.float64)
                log_weights = _pruned(log_weights - squares / (2 * variance))

            x_t = x_s

        # The weights of a row in which an expert failed are NaN; its image must be, too, so that the sampler notices.
        return x_t + expand_rows(0 * log_weights[:num].exp().sum(1), x_t).to(x_t)


def _pruned(log_weights: BranchWeights) -> BranchWeights:
    """Normalise, with weights below ``MIN_WEIGHT`` set to 0 for good (a logarithm of -inf)."""
    log_weights = log_weights.log_softmax(dim=1)
    kept = log_weights.masked_fill(log_weights.exp() < MIN_WEIGHT, -torch.inf)
    return kept.log_softmax(dim=1)
