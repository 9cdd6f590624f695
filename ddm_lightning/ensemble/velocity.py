"""The ensemble's velocity; an expert is evaluated only on the rows routed to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import PATHS, Samples, Times, expand_time, guided, to_velocity
from ddm_lightning.networks.calibration import temperature_at

Route: TypeAlias = Callable[[Float[Tensor, "b K"]], Float[Tensor, "b K"]]
"""Weights of the experts from the router's probabilities."""


class Ensemble:
    """K experts and an optional router; K = 1 without a router is a single model, such as the monolith.

    ``u(x_t, t | c) = Σ_k p(k | x_t, t, c) · u_k(x_t, t | c)`` (DDM, 2501.05450). Gradients are off.

    Args:
        experts: networks with ``forward(x_t, t, condition)`` and a declared ``prediction``, all on one device.
        router: network whose ``forward(x_t, t, condition)`` returns K logits. None for K = 1, or for a
            strategy that needs no router.
        priors: share of the data in each cluster, [K], positive, summing to 1.
        router_conditional: whether the router takes a condition; published ones see x_t and t only.
        paths: path of each expert, in ``flow.path.PATHS``; empty if all are linear.
        temperatures: divisors of the router's logits for rows without and with a condition, by equal parts of t; see
            ``networks.calibration``. An empty one is 1.

    Raises:
        ValueError: no experts, or a number of priors that differs from theirs.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        router: nn.Module | None,
        priors: Sequence[float],
        *,
        router_conditional: bool = True,
        paths: Sequence[str] = (),
        temperatures: tuple[Sequence[float], Sequence[float]] = ((), ()),
    ) -> None:
        if not experts or len(experts) != len(priors):
            raise ValueError(f"{len(experts)} experts with {len(priors)} priors make no ensemble")
        self.experts = [expert.eval() for expert in experts]
        self.router = None if router is None else router.eval()
        self.priors = torch.tensor(priors, dtype=torch.float64)
        self.router_conditional = router_conditional
        self.paths = paths or ["linear"] * len(experts)
        self.temperatures = temperatures
        self.names = [f"expert-{k}" for k in range(len(experts))]
        """Names of the experts for messages."""
        self.failed: set[int] = set()
        """Experts that returned NaN or an infinity so far; see ``failures``."""
        self.expert_rows = 0
        """Rows evaluated by experts so far; guidance evaluates and counts a row twice."""

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.experts)

    @property
    def device(self) -> torch.device:
        """Device of the experts; the CPU if they have no parameters."""
        first = next(self.experts[0].parameters(), None)
        return torch.device("cpu") if first is None else first.device

    @torch.no_grad()
    def probabilities(self, x_t: Samples, t: Times, condition: Condition | None = None) -> Float[Tensor, "b K"]:
        """Compute the router's p(cluster | x_t, t, condition); ones for a single model.

        Raises:
            UserError: several experts and no router.
        """
        if self.num_clusters == 1:
            return torch.ones(len(x_t), 1, device=x_t.device)
        if self.router is None:
            raise UserError("no router in this ensemble; train one (fit member=router) or set sample.strategy=bayes")
        condition = condition if self.router_conditional else None
        logits: Tensor = self.router(x_t, t, condition)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        null, conditional = (temperature_at(t, one) if one else torch.ones_like(t) for one in self.temperatures)
        temperature = null if condition is None else torch.where(condition.keep, conditional, null)
        return (logits / temperature[:, None]).softmax(dim=1)

    @torch.no_grad()
    def expert_velocity(
        self, k: int, x_t: Samples, t: Times, condition: Condition | None = None, guidance_scale: float = 1.0
    ) -> Samples:
        """Compute expert ``k``'s velocity, guided inside the expert (Paris, 2510.03434).

        Args:
            k: the expert.
            x_t: noisy samples.
            t: their times.
            condition: one per row, or None for the null condition, which guidance does not change.
            guidance_scale: 1 is none; otherwise both branches are evaluated as one batch.
        """
        if condition is None or guidance_scale == 1:
            return self._evaluate(k, x_t, t, condition)
        both = Condition.cat([condition, condition.null()])
        velocity = self._evaluate(k, torch.cat([x_t, x_t]), torch.cat([t, t]), both)
        conditional, unconditional = velocity.chunk(2)
        return guided(conditional, unconditional, guidance_scale)

    @torch.no_grad()
    def velocity(
        self,
        x_t: Samples,
        t: Times,
        condition: Condition | None = None,
        *,
        route: Route = lambda probabilities: probabilities,
        weights: Float[Tensor, "b K"] | None = None,
        guidance_scale: float = 1.0,
    ) -> Samples:
        """Sum the experts' velocities, weighted by the router; by default the exact mixture.

        Args:
            x_t: noisy samples.
            t: their times.
            condition: one per row, or None for the null condition in all.
            route: maps p(k | x_t, t) to weights, such as ``Strategy.weights``; weight 0 skips an expert on that row.
            weights: the experts' weights, instead of routed ones.
            guidance_scale: see ``expert_velocity``.

        Raises:
            UserError: several experts and no router.
        """
        weights = route(self.probabilities(x_t, t, condition)) if weights is None else weights
        velocity = torch.zeros_like(x_t)
        for k in range(self.num_clusters):
            rows = weights[:, k].nonzero().squeeze(1)
            if not len(rows):
                continue
            part = None if condition is None else condition.rows(rows)
            of_expert = self.expert_velocity(k, x_t[rows], t[rows], part, guidance_scale)
            share = expand_time(weights[rows, k], of_expert)
            velocity.index_add_(0, rows, (share * of_expert).to(velocity.dtype))
        return velocity

    def _evaluate(self, k: int, x_t: Samples, t: Times, condition: Condition | None) -> Samples:
        self.expert_rows += len(x_t)
        expert, path = self.experts[k], self.paths[k]
        x_tau, tau = PATHS[path].from_linear(x_t, t)
        return to_velocity(expert(x_tau, tau, condition), x_tau, tau, str(expert.prediction), path)
