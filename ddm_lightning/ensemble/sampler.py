"""Pictures from an ensemble, by any strategy and solver, from noise that belongs to the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.bayes import filter_chain
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import VelocityField, time_rows
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.solvers import SOLVERS, integrate, integrate_ancestral
from ddm_lightning.flow.timesteps import sampling_times


@torch.no_grad()
def sample(
    ensemble: Ensemble,
    condition: Condition | None,
    num: int,
    x_shape: tuple[int, int, int],
    *,
    strategy: str,
    num_steps: int,
    shift: float,
    seed: int,
    batch_size: int,
    top_k: int = 2,
    solver: str = "euler",
    guidance_scale: float = 1.0,
    router_prior: bool = True,
    keys: Sequence[tuple[int | str, ...]] | None = None,
    progress: Callable[[float], object] | None = None,
) -> Float[Tensor, "num c h w"]:
    """Draw ``num`` samples.

    All noise of sample i comes from (``seed``, ``keys[i]``) alone: its x_1, the noise of each ancestral step and the
    numbers by which ``bayes`` chooses experts. They are bit-equal whatever the other samples, ``num``, ``batch_size``,
    device, strategy and solver. The sample itself is equal to 1e-4, not bit-equal, because matrix products of another
    number of rows round differently; a choice of expert that is tied to within rounding may tip.

    Args:
        ensemble: the experts, on the device that is to sample.
        condition: one a sample, or None for the null condition in all.
        num: how many samples.
        x_shape: channels, height and width of one.
        strategy: ``full``, ``top-1``, ``top-k`` (see ``routing.route``) or ``bayes`` (see ``bayes.filter_chain``).
        num_steps: steps from noise to data.
        shift: resolution shift of the times; the one that the experts' artifacts record.
        seed: seed of all noise.
        batch_size: samples computed at once.
        top_k: experts that ``top-k`` keeps.
        solver: ``euler`` or ``heun`` (the ODE), or ``ancestral``; ``bayes`` takes no other.
        guidance_scale: classifier-free guidance inside each expert; 1 is none.
        router_prior: whether ``bayes`` starts from the router's p(k | x_1, t = 1, condition), where there is a
            router: with a condition the partition's priors are not p(k | condition).
        keys: what each sample's noise belongs to, such as ``("red apple", 0)``; None numbers the samples.
        progress: called with the number of samples done, in fractions, after every evaluation and batch.

    Returns:
        x_0, float32 on the CPU, in the range in which the experts model it.

    Raises:
        UserError: unknown strategy or solver, or a pair of them that contradicts itself.
        ValueError: ``condition`` or ``keys`` has another number of rows than ``num``.
    """
    if solver not in (*SOLVERS, "ancestral"):
        raise UserError(f"sample.solver {solver!r} is none of {', '.join(SOLVERS)}, ancestral")
    if strategy == "bayes" and solver != "ancestral":
        raise UserError("strategy 'bayes' filters along a stochastic chain; set sample.solver=ancestral")
    if condition is not None and len(condition) != num:
        raise ValueError(f"{len(condition)} conditions for {num} samples")
    keys = [(i,) for i in range(num)] if keys is None else keys
    if len(keys) != num:
        raise ValueError(f"{len(keys)} keys for {num} samples")
    times = sampling_times(num_steps, shift)
    batches: list[Tensor] = [torch.empty(0, *x_shape)]
    for first in range(0, num, batch_size):
        indices = range(first, min(first + batch_size, num))

        def advance(t: Tensor, indices: range = indices) -> None:
            if progress is not None:
                steps_done = int((times > t[0].cpu()).sum())
                progress(indices.start + len(indices) * steps_done / num_steps)

        part = None if condition is None else condition.rows(slice(indices.start, indices.stop))
        batch = _Batch(ensemble, part, keys[indices.start : indices.stop], x_shape, seed, guidance_scale, advance)
        if strategy == "bayes":
            x_0 = batch.bayes(times, router_prior)
        elif solver == "ancestral":
            x_0 = integrate_ancestral(batch.field(strategy, top_k), batch.x_1, times, batch.noise)
        else:
            x_0 = integrate(batch.field(strategy, top_k), batch.x_1, times, solver)
        batches.append(x_0.cpu())
        if progress is not None:
            progress(indices.stop)
    return torch.cat(batches)


class _Batch:
    """Some of the samples: their noise, and their fields."""

    def __init__(
        self,
        ensemble: Ensemble,
        condition: Condition | None,
        keys: Sequence[tuple[int | str, ...]],
        x_shape: tuple[int, int, int],
        seed: int,
        guidance_scale: float,
        advance: Callable[[Tensor], None],
    ) -> None:
        self.ensemble = ensemble
        self.condition = None if condition is None else condition.to(ensemble.device)
        self.keys = keys
        self.x_shape = x_shape
        self.seed = seed
        self.guidance_scale = guidance_scale
        self.advance = advance
        self.x_1 = self._normal("x_1")

    def noise(self, step: int) -> Float[Tensor, "b c h w"]:
        """Standard normal numbers for one step."""
        return self._normal("noise", step)

    def field(self, strategy: str, top_k: int) -> VelocityField:
        """The ensemble's velocity for these samples."""
        inner = self.ensemble.field(self.condition, strategy=strategy, top_k=top_k, guidance_scale=self.guidance_scale)

        def velocity(x_t: Float[Tensor, "b *shape"], t: Float[Tensor, " b"]) -> Float[Tensor, "b *shape"]:
            self.advance(t)
            return inner(x_t, t)

        return velocity

    def bayes(self, times: Float[Tensor, " num_times"], router_prior: bool) -> Float[Tensor, "b c h w"]:
        """x_0 by the filter."""
        ensemble = self.ensemble
        initial = ensemble.priors
        if router_prior and ensemble.router is not None:
            initial = ensemble.probabilities(self.x_1, time_rows(1.0, self.x_1), self.condition)

        def velocity(
            k: int, x_t: Float[Tensor, "r *shape"], t: Float[Tensor, " r"], rows: Int[Tensor, " r"]
        ) -> Float[Tensor, "r *shape"]:
            self.advance(t)
            part = None if self.condition is None else self.condition.rows(rows)
            return ensemble.expert_velocity(k, x_t, t, part, self.guidance_scale)

        return filter_chain(
            velocity, ensemble.num_clusters, self.x_1, times, initial=initial, noise=self.noise, uniform=self._uniform
        ).x_0

    def _normal(self, *key: str | int) -> Float[Tensor, "b c h w"]:
        # Drawn on the CPU, so that every device samples the same pictures.
        drawn = [torch.randn(self.x_shape, generator=keyed_generator(self.seed, *key, *own)) for own in self.keys]
        return torch.stack(drawn).to(self.ensemble.device)

    def _uniform(self, step: int) -> Float[Tensor, " b"]:
        drawn = [torch.rand((), generator=keyed_generator(self.seed, "expert", step, *own)) for own in self.keys]
        return torch.stack(drawn).to(self.ensemble.device)
