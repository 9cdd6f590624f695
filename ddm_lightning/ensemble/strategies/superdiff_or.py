"""``superdiff-or``: SuperDiff's OR, a published relative of ``bayes``, for comparison."""

from __future__ import annotations

import torch
from torch import Tensor

from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Batch, Strategy
from ddm_lightning.flow.path import Samples, Times, VelocityField, expand_time


@STRATEGIES.register("superdiff-or")
class SuperDiffOr(Strategy):
    """Mix all K experts by their densities, tracked along the chain (SuperDiff, 2412.17762, algorithm 1 with OR).

    The weights are ``softmax_k(log π_k + log p_t(x_t | k))``; the paper's ℓ is log π, and its temperature 1. Along the
    chain Itô's formula gives, on the linear path and without terms that all experts share,

        d log p_t(x | k) = (1-t)/t²·⟨dx, x_0^k⟩ + ((2-t)/t³·⟨x, x_0^k⟩ - (1-t)/t³·|x_0^k|²)·(t - s)

    with dx = x_s - x_t and expert k's estimate x_0^k. It differs from ``bayes`` in three ways: this is the first order
    in t - s of the kernels' ratio that ``bayes`` takes, all experts are evaluated at all steps, and a step follows the
    mean of the experts instead of one that is drawn. π is what ``bayes`` starts from.
    """

    needs_router = False
    solvers = ("ancestral",)

    def field(self, batch: Batch) -> VelocityField:
        """Velocity of the mixture; remembers the step before."""
        log_prior = batch.initial_weights().double().log()
        log_density = torch.zeros_like(log_prior)
        before: tuple[Tensor, Tensor, Tensor] | None = None

        def velocity(x_t: Samples, t: Times) -> Samples:
            nonlocal log_density, before
            x, time, _ = batch.branches(x_t, t)
            if before is not None:
                log_density = log_density + _increment(*before, x, time)
            found = batch.expert_velocities(x_t, t, log_prior.isfinite())  # all but those left out
            before = x, time, x[:, None] - expand_time(time, found) * found
            weights = (log_prior + log_density).softmax(1)
            mixed = batch.mixed(t, weights, found)
            batch.record(x_t, t, weights[: len(x_t)], mixed)
            return mixed

        return velocity


def _increment(x_t: Tensor, t: Tensor, x_0: Tensor, x_s: Tensor, s: Tensor) -> Tensor:
    """Change of log p(x | k) from t to s, [r K], up to a number that all experts share; float64."""
    x_t, x_s, x_0, t, s = (
        one.double() for one in (x_t.flatten(1), x_s.flatten(1), x_0.flatten(2), t[:, None], s[:, None])
    )
    direction = ((1 - t) * (x_s - x_t) + (2 - t) / t * (t - s) * x_t) / t**2
    return torch.einsum("rd,rkd->rk", direction, x_0) - (1 - t) / t**3 * (t - s) * x_0.square().sum(2)
