"""The ensemble's velocity and its cost; an expert is evaluated only on the rows routed to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from threading import RLock
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ddm_lightning.core.devices import autocast
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.residency import ResidentExperts
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import Samples, Times, expand_rows, guided, velocity_of
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.flops import forward_flops
from ddm_lightning.networks.blocks import check_compiler, compile_blocks
from ddm_lightning.networks.calibration import temperature_at
from ddm_lightning.networks.rows import IndependentRows

Weights: TypeAlias = Float[Tensor, "b K"]
"""Weights of the clusters' experts, or probabilities of the clusters, for each row."""
Active: TypeAlias = Bool[Tensor, "b K"]
"""Clusters whose experts are evaluated on each row."""
Route: TypeAlias = Callable[[Weights], Weights]
"""Weights of the experts from the router's probabilities."""


@dataclass
class Work:
    """Rows evaluated by an ensemble; guidance evaluates a row twice."""

    expert_rows: list[int]
    """Rows computed by each expert."""
    router_rows: int = 0
    """Rows computed by the router."""
    rows: int = 0
    """Rows for which any expert was evaluated."""
    active: int = 0
    """Experts active on these rows, summed."""
    images: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """Finished samples of each shape."""


@dataclass(frozen=True)
class Cost:
    """Cost of the images sampled so far."""

    gflop: float
    """Forward GFLOP per image over all steps, router included; a multiply-add is 2."""
    experts: float
    """Mean number of active experts per evaluation of an image."""


class NotFiniteError(Exception):
    """An expert returned NaN or an infinity; ``args`` holds its cluster and its name."""


class Ensemble:
    """The experts of K clusters and an optional router; one expert without a router is a single model.

    ``u(x_t, t | c) = Σ_k p(k | x_t, t, c) · u_k(x_t, t | c)`` (DDM, 2501.05450), where u_k is the expert of cluster k
    whose interval holds t. So in every [b, K], such as weights, columns are clusters, not experts. Gradients are off.

    Args:
        experts: networks with ``forward(x_t, t, condition)`` and a declared ``prediction``, all on one device.
        router: network whose ``forward(x_t, t, condition)`` returns K logits. None for K = 1, or for a
            strategy that needs no router.
        priors: share of the data in each cluster, [K], positive, summing to 1.
        names: of the experts, for messages and charts; empty for ``expert-0`` and so on.
        expert_clusters: cluster of each expert; empty if each has its own.
        intervals: low and high of each expert, which serves t in [low, high); those of one cluster cover [0, 1]. Empty
            if each is for all t.
        router_conditional: whether the router takes a condition; those of DDM and Paris see x_t and t only.
        paths: path of each expert, in ``flow.path.PATHS``; empty if all are linear.
        temperatures: divisors of the router's logits for rows without and with a condition, by equal parts of t; see
            ``networks.calibration``. Empty for 1.
        clusters: index of each cluster's logit in the router's output; other logits are skipped, and the softmax over
            the rest is exact. Empty for 0 to K-1.
        class_counts: images of each class in each cluster, [K][num_classes]; empty if unknown.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module] | ResidentExperts,
        router: nn.Module | None,
        priors: Sequence[float],
        *,
        names: Sequence[str] = (),
        expert_clusters: Sequence[int] = (),
        intervals: Sequence[tuple[float, float]] = (),
        router_conditional: bool = True,
        paths: Sequence[str] = (),
        temperatures: tuple[Sequence[float], Sequence[float]] = ((), ()),
        clusters: Sequence[int] = (),
        class_counts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.experts = experts
        self.router = router
        for network in self.networks:
            network.eval()

        num_experts = len(experts)
        self.priors = torch.tensor(priors, dtype=torch.float64)
        self.router_conditional = router_conditional
        self.predictions = [str(expert.prediction) for expert in self.experts]
        self.paths = paths or ["linear"] * num_experts
        self.expert_clusters = list(expert_clusters) or list(range(num_experts))
        self.intervals = list(intervals) or [(0.0, 1.0)] * num_experts
        self.temperatures = temperatures
        self.clusters = list(clusters) or list(range(len(priors)))
        # On the device, because a list would be copied there at each call.
        self._logits = torch.tensor(self.clusters, device=self.device) if clusters else slice(None)
        self._class_shares: Tensor | None = None
        """p(class | k), [num_classes, K]."""
        if class_counts and all(class_counts):
            counts = torch.tensor(class_counts, dtype=torch.float64)
            self._class_shares = (counts / counts.sum(1, keepdim=True)).T.to(self.device)

        self.names = list(names) or [f"expert-{k}" for k in range(num_experts)]
        self.precision = "auto"
        """Precision of the networks, as ``sample.precision``; times, weights and velocities stay float32."""
        self.failed: set[int] = set()
        """Experts that returned NaN or an infinity so far; see ``failures``."""
        self.work = Work([0] * num_experts)
        """Rows evaluated so far."""
        self.lock = RLock()
        """For threads: one sample's settings and experts on the device are not another's. Copies share it."""
        self._is_compiled = False
        self._is_watched = False
        self._log_factors = torch.zeros(self.num_clusters, dtype=torch.float32, device=self.device)

    @property
    def networks(self) -> list[nn.Module]:
        """The experts, and the router if there is one."""
        if self.router is None:
            return list(self.experts)

        return [*self.experts, self.router]

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.priors)

    @property
    def cluster_names(self) -> list[str]:
        """Names of each cluster's experts, for charts."""
        experts: list[list[str]] = [[] for _ in self.priors]
        for name, k in zip(self.names, self.expert_clusters, strict=True):
            experts[k].append(name)

        return list(map(" + ".join, experts))

    @property
    def device(self) -> torch.device:
        """Device of the experts; the CPU if they have no parameters."""
        if isinstance(self.experts, ResidentExperts):
            return self.experts.device

        return next(self.networks[0].parameters(), torch.empty(0)).device

    def cost(self, condition: ConditionSpec) -> Cost:
        """Cost per image of the finished samples, as if each network had computed all shapes equally often.

        Args:
            condition: kind of the experts' condition.
        """
        work = self.work
        num_rows = [*work.expert_rows, work.router_rows]
        num_images = max(1, work.images.total())
        flops = 0.0
        for network, rows in zip(self.networks, num_rows, strict=False):
            if network is self.router and not self.router_conditional:
                condition = ConditionSpec("none", 0)  # the router is the last network

            for x_shape, num in work.images.items():
                if rows:
                    flops += rows * num / num_images * forward_flops(network, x_shape, condition)

        return Cost(flops / num_images / 1e9, work.active / max(1, work.rows))

    def reweighted(self, factors: Sequence[float]) -> Ensemble:
        """A copy with the clusters' priors and probabilities multiplied by ``factors`` and renormalised; 0 removes one.

        Raises:
            UserError: not one number from 0 up per cluster, or none is left.
        """
        if len(factors) != self.num_clusters or not all(0 <= factor < float("inf") for factor in factors):
            raise UserError(f"factors = {list(factors)}: give {self.num_clusters} numbers from 0 up, one per cluster")

        own = torch.tensor(factors, dtype=torch.float64)
        kept = self.priors * own
        if not kept.any():
            raise UserError("every expert is switched off; leave one on")

        changed = copy(self)
        changed.priors = kept / kept.sum()
        changed._log_factors = self._log_factors + own.log().to(self._log_factors)
        return changed

    def watched(self, excluded: Collection[int]) -> Ensemble:
        """A copy without the experts of ``excluded`` clusters. It checks every output for NaN and waits for the device.

        Raises ``NotFiniteError`` for an expert and ``UserError`` for the router. No cluster changes its number.
        """
        factors = [float(k not in excluded) for k in range(self.num_clusters)]
        changed = self.reweighted(factors)
        changed._is_watched = True
        return changed

    def compile(self, backend: str = "inductor") -> None:
        """Compile the transformer blocks of the experts and the router, once.

        Raises:
            UserError: the experts take turns on the device, or nothing can be compiled there.
        """
        if isinstance(self.experts, ResidentExperts):
            raise UserError("sample.compile = true: does not go with sample.resident_experts; remove one of them")

        if not self._is_compiled:
            check_compiler("sample.compile", self.device, backend)
            for network in self.networks:
                compile_blocks(network, backend, any_size=True)

        self._is_compiled = True

    @torch.no_grad()
    def probabilities(
        self, x_t: Samples, t: Times, condition: Condition | None = None, temperature: float = 1.0
    ) -> Weights:
        """Compute the router's p(cluster | x_t, t, condition); ones for a single model.

        Args:
            x_t: noisy samples.
            t: their times.
            condition: one per row, or None for the null condition in all.
            temperature: divides the calibrated logits.

        Raises:
            UserError: several experts and no router.
        """
        if self.num_clusters == 1:
            return torch.ones(len(x_t), 1, device=x_t.device)
        if self.router is None:
            raise UserError("no router in this ensemble; train one (fit member=router) or set sample.strategy=bayes")
        if not self.router_conditional:
            condition = None

        self.work.router_rows += len(x_t)
        logits = self._output(self.router, x_t, t, condition)[:, self._logits]
        null, conditional = self.temperatures
        fitted = temperature_at(t, null)
        if condition is not None:
            fitted = torch.where(condition.keep, temperature_at(t, conditional), fitted)

        logits = logits / (temperature * fitted[:, None])
        probabilities = (logits + self._log_factors).softmax(dim=1)
        if self._is_watched:
            return finite(probabilities)

        return probabilities

    def prior_weights(self, condition: Condition | None, num: int) -> Float[Tensor, "{num} K"]:
        """Compute p(k | condition) of ``num`` rows without a router.

        Exact for classes, by Bayes' rule from the counts of their images: p(k | class) ∝ p(k)·p(class | k). The priors
        p(k) for null rows, for a class that no expert has seen, for other conditions and for unknown counts.
        """
        priors = self.priors.to(self.device).expand(num, -1)
        if condition is None or self._class_shares is None:
            return priors

        weights = priors * self._class_shares[condition.values]
        known = condition.keep & weights.any(1)
        weights = weights / weights.sum(1, keepdim=True)
        return torch.where(known[:, None], weights, priors)

    @torch.no_grad()
    def expert_velocities(
        self, x_t: Samples, t: Times, condition: Condition | None, active: Active
    ) -> Float[Tensor, "b K *shape"]:
        """Compute the velocities of the ``active`` clusters of each row; 0 for the others."""
        velocities = x_t.new_zeros(len(x_t), self.num_clusters, *x_t.shape[1:])
        for k, rows, of_expert in self._of_active(x_t, t, condition, active):
            velocities[rows, k] = of_expert.to(velocities.dtype)

        return velocities

    @torch.no_grad()
    def velocity(
        self,
        x_t: Samples,
        t: Times,
        condition: Condition | None = None,
        *,
        weights: Weights | None = None,
        null_weights: Weights | None = None,
        guidance_scale: float | Times = 1.0,
        negative: Condition | None = None,
    ) -> Samples:
        """Sum the experts' velocities, weighted by the router: by default the exact mixture.

        Guidance takes ``u_0 + scale·(u_c - u_0)`` of the weighted sums with and without the condition. If both have the
        same weights, that is guidance inside each expert (Paris, 2510.03434). With ``null_weights`` p(k | x_t, t), it
        is guidance of the mixture, as a single model trained on all data has it. With a ``negative`` condition n, u_n
        and p(k | x_t, t, n) take the place of u_0 and p(k | x_t, t). Guidance inside each expert then moves expert k
        from n to c within its own cluster, and the weights stay those of c.

        Args:
            x_t: noisy samples.
            t: their times.
            condition: one per row, or None for the null condition in all, which guidance does not change.
            weights: the experts' weights, instead of the router's probabilities; weight 0 skips an expert on that row.
            null_weights: weights without the condition, or under ``negative``; None for the same.
            guidance_scale: one number, or one per row; 1 is none. Both branches are evaluated as one batch.
            negative: one per row, which guidance leads away from; None for the null condition in all.

        Raises:
            UserError: several experts and no router.
        """
        if weights is None:
            weights = self.probabilities(x_t, t, condition)
        if condition is None or (isinstance(guidance_scale, float) and guidance_scale == 1):
            return self._sum(x_t, t, condition, weights)

        scale = torch.ones_like(t) * guidance_scale
        if null_weights is None:
            null_weights = weights

        both = torch.cat([weights, null_weights * (scale != 1)[:, None]])
        conditional, unconditional = self._sum(*both_branches(x_t, t, condition, negative), both).chunk(2)
        return guided(conditional, unconditional, scale)

    def _sum(self, x_t: Samples, t: Times, condition: Condition | None, weights: Weights) -> Samples:
        velocity = torch.zeros_like(x_t)
        for k, rows, of_expert in self._of_active(x_t, t, condition, weights != 0):
            share = expand_rows(weights[rows, k], of_expert)
            velocity.index_add_(0, rows, (share * of_expert).to(velocity.dtype))

        return velocity

    def _of_active(
        self, x_t: Samples, t: Times, condition: Condition | None, active: Active
    ) -> Iterator[tuple[int, Int[Tensor, " r"], Float[Tensor, "r *shape"]]]:
        """Yield the cluster, rows and velocity of each expert that has rows."""
        held = active
        if self.expert_clusters != list(range(self.num_clusters)):
            # Half-open, so that each t has one expert of a cluster; the last one has t = 1, too.
            columns = []
            for k, (low, high) in zip(self.expert_clusters, self.intervals, strict=True):
                is_held = (t >= low) & ((t < high) | (high == 1))
                columns.append(active[:, k] & is_held)

            held = torch.stack(columns, 1)

        groups, num_rows = rows_by_expert(held)
        self.work.rows += num_rows
        self.work.active += sum(map(len, groups))
        used = {number: rows for number, rows in enumerate(groups) if len(rows)}
        if isinstance(self.experts, ResidentExperts):
            self.experts.turns = list(used)

        for number, rows in used.items():
            self.work.expert_rows[number] += len(rows)
            network = partial(self._output, self.experts[number])
            own = condition and condition.rows(rows)
            kind = (self.predictions[number], self.paths[number])
            velocity = velocity_of(network, x_t[rows], t[rows], own, *kind)
            if self._is_watched and not velocity.isfinite().all():
                raise NotFiniteError(self.expert_clusters[number], self.names[number])

            yield self.expert_clusters[number], rows, velocity

    def _output(
        self, network: Callable[..., Tensor], x_t: Samples, t: Times, condition: Condition | None
    ) -> Float[Tensor, "b *output"]:
        """Evaluate a network in ``precision``; its output is float32, or float64 if the network's is."""
        layers: AbstractContextManager[object] = nullcontext()
        if x_t.device.type == "cpu" and not self._is_compiled:
            layers = IndependentRows()

        with autocast(self.precision, x_t.device), layers:
            output = network(x_t, t, condition)

        return output.to(torch.promote_types(output.dtype, torch.float32))


def finite(probabilities: Weights) -> Weights:
    """Check the router's probabilities of finite samples; waits for the device.

    Raises:
        UserError: one is NaN.
    """
    if not probabilities.isfinite().all():
        raise UserError(
            "router: returns NaN; fit it again, or sample with sample.strategy=bayes "
            "sample.strategy_params.router_prior=false"
        )

    return probabilities


def both_branches(
    x_t: Samples, t: Times, condition: Condition, negative: Condition | None = None
) -> tuple[Float[Tensor, "r *shape"], Float[Tensor, " r"], Condition]:
    """Rows with the condition, then as many with the ``negative`` condition, by default the null condition."""
    if negative is None:
        negative = condition.null()

    return torch.cat([x_t, x_t]), torch.cat([t, t]), Condition.cat([condition, negative])


def rows_by_expert(active: Active) -> tuple[list[Int[Tensor, " _"]], int]:
    """The rows of each expert, ascending, and the number of rows with any; waits for the device once."""
    *counts, num_rows = torch.cat([active.sum(0), active.any(1).sum()[None]]).tolist()
    # Entries are (expert, row). The active ones come first, in their order, because the sort is stable.
    order = active.T.flatten().argsort(descending=True, stable=True)[: sum(counts)]
    return list((order % len(active)).split(counts)), num_rows
