"""Sampling without a router: along a stochastic reverse chain, the cluster posterior is a Bayesian filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.flow.path import VelocityField, time_rows, x_0_from_velocity
from ddm_lightning.flow.solvers import reverse_kernel
from ddm_lightning.flow.timesteps import intervals

MIN_WEIGHT = 1e-4
"""An expert whose weight falls below is dropped from that row for the rest of the chain."""

RowVelocity: TypeAlias = Callable[
    [int, Float[Tensor, "r *shape"], Float[Tensor, " r"], Int[Tensor, " r"]], Float[Tensor, "r *shape"]
]
"""``velocity(k, x_t, t, rows)``: expert k on some rows of the batch; ``rows`` says which, for their conditions."""


@dataclass(frozen=True, eq=False)
class BayesSamples:
    """What the filter leaves."""

    x_0: Float[Tensor, "b *shape"]
    """The samples."""
    weights: Float[Tensor, "steps b K"]
    """``weights[i]`` is the filter's p(k | x_1 … x_t) at ``times[i]``, before the step from there; float64."""
    mean_active: float
    """Experts evaluated a row and step, on average."""


def sample_bayes(
    experts: Sequence[VelocityField],
    x_1: Float[Tensor, "b *shape"],
    times: Float[Tensor, " num_times"],
    *,
    initial: Float[Tensor, " K"] | Float[Tensor, "b K"],
    noise: Callable[[int], Float[Tensor, "b *shape"]],
    uniform: Callable[[int], Float[Tensor, " b"]],
) -> BayesSamples:
    """``filter_chain`` for experts that need to know nothing of their rows; its arguments are the same."""

    def velocity(
        k: int, x_t: Float[Tensor, "r *shape"], t: Float[Tensor, " r"], _: Int[Tensor, " r"]
    ) -> Float[Tensor, "r *shape"]:
        return experts[k](x_t, t)

    return filter_chain(velocity, len(experts), x_1, times, initial=initial, noise=noise, uniform=uniform)


@torch.no_grad()
def filter_chain(
    velocity: RowVelocity,
    num_clusters: int,
    x_1: Float[Tensor, "b *shape"],
    times: Float[Tensor, " num_times"],
    *,
    initial: Float[Tensor, " K"] | Float[Tensor, "b K"],
    noise: Callable[[int], Float[Tensor, "b *shape"]],
    uniform: Callable[[int], Float[Tensor, " b"]],
) -> BayesSamples:
    """Draw samples from a mixture of experts whose weights are filtered along the chain itself.

    An expert that knows its cluster steps by the kernel q_k(x_s | x_t) = N(μ_k, σ²I) of ``reverse_kernel``, with
    its own estimate of x_0. The mixture's step is Σ_k w_k q_k with w_k = p(k | x_t), so a step draws k ~ w, then
    x_s ~ q_k, and by Bayes' rule p(k | x_s) ∝ w_k · q_k(x_s | x_t). The kernel is Gaussian only in the limit of
    small steps; that is the method's one approximation. (Exact experts, four unequal 2-D clusters, 20 steps: the total
    variation between w and the exact posterior, averaged over samples, is 0.001 on average over the steps and 0.003 to
    0.005 at the worst step; it grows as clusters overlap.) The last step, to s = 0, takes the drawn expert's estimate.
    The discrete-time relative of SuperDiff's density-weighted OR (2412.17762), with priors and pruning.

    Args:
        velocity: expert k's velocity, called only on the rows in which expert k is still active.
        num_clusters: K.
        x_1: the state at ``times[0]``.
        times: falling times, usually from 1 to 0 (``timesteps.sampling_times``).
        initial: p(k) at ``times[0]``: the partition's priors [K], or one row a sample [b, K].
        noise: ``noise(i)`` gives step i's standard normal numbers.
        uniform: ``uniform(i)`` gives step i's uniform numbers in [0, 1), which draw the experts.

    Raises:
        ValueError: bad ``times``, or ``initial`` without K columns.
    """
    if initial.shape[-1] != num_clusters:
        raise ValueError(f"{initial.shape[-1]} initial weights for {num_clusters} experts")
    steps = intervals(times)
    rows = torch.arange(len(x_1), device=x_1.device)
    # Logarithms, because likelihoods of many pixels underflow; float64, because their ratio is a small difference.
    log_weights = _pruned(initial.to(x_1.device, torch.float64).log().expand(len(x_1), num_clusters))
    history: list[Tensor] = []
    num_evaluated = 0
    x_t = x_1
    for i, (t, s) in enumerate(steps):
        weights = log_weights.exp()
        history.append(weights)
        means = x_t.new_zeros(len(x_t), num_clusters, *x_t.shape[1:])
        variance = torch.zeros((), dtype=torch.float64)
        for k in range(num_clusters):
            active = weights[:, k].nonzero().squeeze(1)
            if not len(active):
                continue
            x_active = x_t[active]
            t_active = time_rows(t, x_active)
            x_0_hat = x_0_from_velocity(x_active, velocity(k, x_active, t_active, active), t_active)
            mean, variance = reverse_kernel(x_active, x_0_hat, t, s)
            means[active, k] = mean.to(means.dtype)
            num_evaluated += len(active)
        drawn = _draw(weights, uniform(i))
        x_s = means[rows, drawn]
        if s > 0:
            x_s = x_s + (variance.sqrt() * noise(i)).to(x_s.dtype)
            squares = (x_s[:, None] - means).flatten(2).square().sum(dim=2, dtype=torch.float64)
            log_weights = _pruned(log_weights - squares / (2 * variance))
        x_t = x_s
    return BayesSamples(x_t, torch.stack(history), num_evaluated / (len(x_1) * len(steps)))


def _pruned(log_weights: Float[Tensor, "b K"]) -> Float[Tensor, "b K"]:
    """Normalised; -inf for what is below ``MIN_WEIGHT``, and so for ever after."""
    log_weights = log_weights.log_softmax(dim=1)
    kept = log_weights.masked_fill(log_weights.exp() < MIN_WEIGHT, -torch.inf)
    return kept.log_softmax(dim=1)


def _draw(weights: Float[Tensor, "b K"], uniform: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """One expert a row, by inverting the cumulative weights; never one of weight 0."""
    cumulative = weights.cumsum(dim=1)
    # Scaled by the last sum, because rounding may leave it below a uniform number close to 1.
    threshold = (uniform.to(cumulative) * cumulative[:, -1])[:, None]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
