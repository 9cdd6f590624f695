"""The interface of routing strategies, and the batches and traces that they work on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.velocity import Ensemble, Route, Weights, both_branches, finite
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import (
    Samples,
    Times,
    VelocityField,
    guided,
    interpolate,
    time_rows,
    x_0_from_velocity,
)
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.solvers import OnStep, Solver, unchanged

Key: TypeAlias = tuple[int | str, ...]
"""Key of a sample's noise, such as ``("red apple", 0)``."""
Images: TypeAlias = Float[Tensor, "b c h w"]
"""Samples as images or latents."""
BranchWeights: TypeAlias = Float[Tensor, "r K"]
"""``Weights`` of all ``Batch.num_branches``; r is b or 2b."""
BranchVelocities: TypeAlias = Float[Tensor, "r K *shape"]
"""Velocities of each cluster's expert on all branches."""


class Trace:
    """The sampling trajectory of some samples, by their keys; give it to ``sample``. It is on the CPU.

    Evaluations stay on the device until a batch is finished, so that no step waits for them. A strategy that mixes the
    experts on its own and does not call ``Batch.record`` leaves the trace empty.

    Args:
        keys: samples whose weights are kept; None for all.
        images: samples of which x_t and x_0 are kept, too.
    """

    def __init__(self, keys: Collection[Key] | None = None, images: Collection[Key] = ()) -> None:
        self._keys = keys
        self._images = images
        self.times: Float[Tensor, " num_times"] = torch.empty(0)
        """Decreasing times of the steps; the last one is 0."""
        self.weights: dict[Key, Float[Tensor, "steps K"]] = {}
        """Weights of the experts at the start of each step."""
        self.x_t: dict[Key, Float[Tensor, "num_times c h w"]] = {}
        """The sample at each time, from noise to the end."""
        self.x_0: dict[Key, Float[Tensor, "num_times c h w"]] = {}
        """Its estimate of x_0 at each time, ``x_t - t·velocity``."""

    def begin(self, keys: Sequence[Key], device: torch.device) -> None:
        """Begin a batch of the samples ``keys``."""
        self._batch = keys
        self._evaluations = list[tuple[Tensor, ...]]()
        shown = [row for row, key in enumerate(keys) if key in self._images]
        self._rows = torch.tensor(shown, dtype=torch.long, device=device)

    def add(self, x_t: Samples, t: Times, weights: Weights, velocity: Samples) -> None:
        """Keep one evaluation of the batch."""
        x_t = x_t[self._rows]
        velocity = velocity[self._rows]
        self._evaluations.append((t, weights, x_t, x_0_from_velocity(x_t, velocity, t[self._rows])))

    def end(self, times: Float[Tensor, " num_times"], x_0: Images) -> None:
        """End the batch: keep its evaluation at each of ``times``, and the finished ``x_0`` at the last one."""
        if not self._evaluations:
            return

        t, weights, x_t, estimates = map(torch.stack, zip(*self._evaluations, strict=True))
        # Solvers also evaluate between steps, and some choose their own steps. Take the closest; of equals, the last.
        distances = (t.flip(0) - times[:-1, None, None].to(t)).abs()
        nearest = len(t) - 1 - distances.argmin(1)
        weights = weights.take_along_dim(nearest[..., None], 0).float().cpu()
        steps = nearest[:, self._rows, None, None, None]
        x_t = x_t.take_along_dim(steps, 0).float().cpu()
        estimates = estimates.take_along_dim(steps, 0).float().cpu()
        self.times = times.cpu()
        for row, key in enumerate(self._batch):
            if self._keys is None or key in self._keys:
                self.weights[key] = weights[:, row]

        for column, row in enumerate(self._rows.tolist()):
            key = self._batch[row]
            last = x_0[row, None].float()
            self.x_t[key] = torch.cat([x_t[:, column], last])
            self.x_0[key] = torch.cat([estimates[:, column], last])


@dataclass(eq=False)
class Batch:
    """Samples generated together: their ensemble, conditions and noise."""

    ensemble: Ensemble
    """The experts, on the device that samples."""
    condition: Condition | None
    """One per sample, or None for the null condition in all."""
    keys: Sequence[Key]
    """Key of each sample's noise."""
    x_shape: tuple[int, int, int]
    """Channels, height and width of a sample."""
    seed: int | Sequence[int]
    """Seed of all noise, or one per sample."""
    settings: SampleConfig
    """Guidance and the router's temperature."""
    on_evaluation: Callable[[Tensor], object] = lambda _: None
    """Called with the times [r] before the experts are evaluated."""
    trace: Trace | None = None
    """Records every evaluation; None records nothing."""
    clusters: Int[Tensor, " b"] | None = None
    """Cluster of the image that each condition describes, on the CPU; None if unknown."""
    negative: Condition | None = None
    """One per sample in place of the null condition; None is the null condition."""
    own_noise: Images | None = None
    """Noise at t = 1; None draws it by the keys."""
    image: Images | None = None
    """x_0 to start from, noisy; None starts from noise."""
    skipped_times: Sequence[float] = (1.0,)
    """Times from 1 to the start of sampling, both included; the steps between them are not run."""
    on_step: OnStep = unchanged
    """Called after each step."""

    def __post_init__(self) -> None:
        device = self.ensemble.device
        if self.negative is not None:
            self.negative = self.negative.to(device)
            if self.condition is None:
                self.condition = self.negative.null()
        if self.condition is not None:
            self.condition = self.condition.to(device)

        self._is_guided = self.condition is not None and self.settings.guidance_scale != 1
        self.num_branches = 1
        """2 if the mixture is guided: rows with the condition, then as many without. Otherwise 1."""
        if self._is_guided and self.settings.guidance == "mixture":
            self.num_branches = 2
        if self.trace is not None:
            self.trace.begin(self.keys, device)

        if self.own_noise is None:
            self.noise_1 = self._drawn(torch.randn, self.x_shape, "x_1")
        else:
            self.noise_1 = self.own_noise.to(device, torch.float32)

        self.x_1 = self.noise_1
        """Value at ``start``: noise, or the noisy image."""
        if self.image is not None:
            self.image = self.image.to(self.x_1)
            self.x_1 = interpolate(self.image, self.noise_1, time_rows(self.start, self.noise_1))

    @property
    def start(self) -> float:
        """Time at which sampling starts: 1 without an image."""
        return self.skipped_times[-1]

    def guidance_scale(self, t: Times) -> Times:
        """Scale of each row's guidance: 1 is none, as outside ``guidance_interval`` and before ``start``."""
        low, high = self.settings.guidance_interval
        return torch.where((t >= low) & (t <= min(high, self.start)), self.settings.guidance_scale, 1.0).to(t)

    def noise(self, step: int) -> Images:
        """Standard normal numbers of one step."""
        return self._drawn(torch.randn, self.x_shape, "noise", step)

    def uniform(self, step: int) -> Float[Tensor, " b"]:
        """Uniform numbers in [0, 1) of one step."""
        return self._drawn(torch.rand, (), "expert", step)

    def branches(self, x_t: Samples, t: Times) -> tuple[Tensor, Tensor, Condition | None]:
        """``x_t``, ``t`` and conditions of all ``num_branches``."""
        if self.condition is None or self.num_branches == 1:
            return x_t, t, self.condition

        return both_branches(x_t, t, self.condition, self.negative)

    def probabilities(self, x_t: Samples, t: Times) -> BranchWeights:
        """The router's p(k | x_t, t, condition) of all ``num_branches``.

        Raises:
            UserError: several experts and no router.
        """
        x_t, t, condition = self.branches(x_t, t)
        return self.ensemble.probabilities(x_t, t, condition, self.settings.router_temperature)

    def initial_weights(self, *, use_router: bool = True) -> BranchWeights:
        """Compute p(k | x_1, t = ``start``, condition) of all ``num_branches`` by the router.

        Without a router, ``Ensemble.prior_weights``, which hold at t = 1 only.

        Raises:
            UserError: the router returns NaN, or sampling starts from an image and there is no router to read it.
        """
        t = time_rows(self.start, self.x_1)
        if use_router and (self.ensemble.router is not None or self.image is not None):
            return finite(self.probabilities(self.x_1, t))

        x_1, _, condition = self.branches(self.x_1, t)
        return self.ensemble.prior_weights(condition, len(x_1))

    def field(self, *, route: Route | None = None, weights: Weights | None = None) -> VelocityField:
        """The ensemble's guided velocity for these samples, with routed or given weights of the experts."""

        def velocity(x_t: Samples, t: Times) -> Samples:
            self.on_evaluation(t)
            own = [weights]
            if route is not None:
                own = [route(part) for part in self.probabilities(x_t, t).split(len(x_t))]

            scale = self.guidance_scale(t) if self._is_guided else 1.0
            # With one branch, both are the same weights.
            found = self.ensemble.velocity(
                x_t,
                t,
                self.condition,
                weights=own[0],
                null_weights=own[-1],
                guidance_scale=scale,
                negative=self.negative,
            )
            self.record(x_t, t, own[0], found)
            return found

        return velocity

    def record(self, x_t: Samples, t: Times, weights: Weights | None, velocity: Samples) -> None:
        """Add the weights and the velocity at ``x_t`` and ``t`` to the trace, if there is one."""
        if self.trace is not None and weights is not None:
            self.trace.add(x_t, t, weights, velocity)

    def mixed(self, t: Times, weights: BranchWeights, found: BranchVelocities) -> Samples:
        """Sum the experts' velocities ``found`` on all ``num_branches``, and guide the mixture."""
        mixed = mixture(weights, found)
        if self.num_branches == 1:
            return mixed

        conditional, unconditional = mixed.chunk(2)
        return guided(conditional, unconditional, self.guidance_scale(t))

    def expert_velocities(self, x_t: Samples, t: Times, active: Bool[Tensor, "r K"]) -> BranchVelocities:
        """The active experts' velocities on all ``num_branches``; 0 for the others.

        Guided if guidance happens inside each expert.

        Args:
            x_t: noisy samples, [b, …].
            t: their times, [b].
            active: experts of each row of each branch; r is b·``num_branches``.
        """
        self.on_evaluation(t)
        if self.condition is None or self.num_branches == 2 or not self._is_guided:
            return self.ensemble.expert_velocities(*self.branches(x_t, t), active)

        scale = self.guidance_scale(t)
        active = torch.cat([active, active & (scale != 1)[:, None]])
        both = self.ensemble.expert_velocities(*both_branches(x_t, t, self.condition, self.negative), active)
        conditional, unconditional = both.chunk(2)
        return guided(conditional, unconditional, scale)

    def _drawn(self, draw: Callable[..., Tensor], shape: tuple[int, ...], *key: str | int) -> Samples:
        # Generated on the CPU, so that every device produces the same images.
        rows = []
        seeds = self.seed
        if isinstance(seeds, int):
            seeds = [seeds] * len(self.keys)

        for seed, own in zip(seeds, self.keys, strict=True):
            generator = keyed_generator(seed, *key, *own)
            rows.append(draw(shape, generator=generator))

        return torch.stack(rows).to(self.ensemble.device, non_blocking=True)


class Strategy:
    """Base class of routing strategies.

    Override ``weights`` to weight the experts by the router's probabilities, ``field`` for another velocity, or
    ``generate`` to run a chain of your own. Arguments of the constructor are the user's ``sample.strategy_params``;
    raise ``ValueError`` to refuse them. Check a plug-in with ``ddm_lightning.testing.check_strategy``.
    """

    needs_router: ClassVar[bool] = True
    """Whether several experts need a router."""
    solvers: ClassVar[tuple[str, ...]] = ()
    """Solvers that work with the strategy, its default first; empty for all."""

    def check_solver(self, solver: str) -> None:
        """Refuse a solver that does not work with the strategy.

        Raises:
            UserError: the line names ``sample.solver``.
        """
        if self.solvers and solver not in self.solvers:
            raise UserError(
                f"this strategy needs sample.solver={' or '.join(self.solvers)}, not {solver!r}; "
                f"add sample.solver={self.solvers[0]}"
            )

    def weights(self, probabilities: Weights) -> Weights:
        """Weight the experts of each row.

        Args:
            probabilities: p(cluster | x_t, t, condition); rows sum to 1.

        Returns:
            Rows that sum to 1; an expert of weight 0 is not evaluated on that row.
        """
        raise NotImplementedError

    def field(self, batch: Batch) -> VelocityField:
        """Velocity of the batch; by default the experts' velocities weighted by ``weights``."""
        return batch.field(route=self.weights)

    def generate(self, batch: Batch, times: Float[Tensor, " num_times"], solver: Solver) -> Images:
        """Go from ``batch.x_1`` at ``times[0]`` to x_0 with the velocity of ``field``."""
        return solver.solve(self.field(batch), batch.x_1, times, batch.noise, batch.on_step)


def strategy_of(settings: SampleConfig) -> Strategy:
    """Build ``sample.strategy`` with its params.

    Raises:
        UserError: unknown strategy, or params that it refuses.
    """
    return STRATEGIES.build(settings.strategy, settings.strategy_params)


def mixture(weights: BranchWeights, found: BranchVelocities) -> Samples:
    """Sum the experts' velocities or means, weighted."""
    return torch.einsum("rk,rk...->r...", weights.to(found), found)


def normalised(
    shares: Float[Tensor, "b n"], experts: Int[Tensor, "b n"], num_clusters: int
) -> Float[Tensor, "b {num_clusters}"]:
    """Weights proportional to the ``shares`` of the chosen ``experts``, and 0 for all others."""
    weights = shares.new_zeros(len(shares), num_clusters)
    return weights.scatter_(1, experts, shares / shares.sum(dim=1, keepdim=True))


def choose(weights: Weights, uniform: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """Choose one expert per row by inverting the cumulative ``weights``; never one of weight 0."""
    cumulative = weights.cumsum(dim=1)
    # Scaled by the total: rounding may leave it below a uniform number close to 1.
    threshold = (uniform.to(cumulative) * cumulative[:, -1])[:, None]
    # A row of NaN, from a failed expert, would give an index past the last expert.
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1).clamp_max(weights.shape[1] - 1)
