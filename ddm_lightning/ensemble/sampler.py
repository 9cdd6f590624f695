"""Generate images with any strategy and solver; each image has noise of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import Batch, Strategy
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.solvers import SOLVERS
from ddm_lightning.flow.timesteps import sampling_times


@torch.no_grad()
def sample(
    ensemble: Ensemble,
    condition: Condition | None,
    num: int,
    x_shape: tuple[int, int, int],
    *,
    strategy: str | Strategy,
    num_steps: int,
    shift: float,
    seed: int,
    batch_size: int,
    solver: str = "euler",
    guidance_scale: float = 1.0,
    keys: Sequence[tuple[int | str, ...]] | None = None,
    progress: Callable[[float], object] | None = None,
) -> Float[Tensor, "num c h w"]:
    """Generate ``num`` samples.

    All noise of sample i depends on (``seed``, ``keys[i]``) alone: its x_1, the noise of each ancestral step and the
    numbers by which ``bayes`` chooses experts. It is bit-equal for any other samples, ``num``, ``batch_size``, device,
    strategy and solver. The sample itself is equal to 1e-4 only, because matrix products round differently for
    another number of rows; a choice of expert that is tied to within rounding may flip.

    Args:
        ensemble: the experts, on the device that samples.
        condition: one per sample, or None for the null condition in all.
        num: number of samples.
        x_shape: channels, height and width of one sample.
        strategy: name of a routing strategy, or a strategy with params, such as ``TopK(top_k=3)``.
        num_steps: steps from noise to data.
        shift: resolution shift of the times, as recorded in the experts' artifacts.
        seed: seed of all noise.
        batch_size: samples computed at once.
        solver: ``euler`` or ``heun`` (the ODE), or ``ancestral``; must be one of ``strategy.solvers``.
        guidance_scale: classifier-free guidance inside each expert; 1 is none.
        keys: what each sample's noise belongs to, such as ``("red apple", 0)``; None numbers the samples.
        progress: called with the number of finished samples, fractional, after every evaluation and batch.

    Returns:
        x_0, float32, on the CPU, in the value range that the experts model.

    Raises:
        UserError: unknown strategy or solver, a pair that does not work together, or no router.
        ValueError: the number of rows of ``condition`` or ``keys`` is not ``num``.
    """
    if solver not in (*SOLVERS, "ancestral"):
        raise UserError(f"sample.solver {solver!r} is none of {', '.join(SOLVERS)}, ancestral")
    name = strategy if isinstance(strategy, str) else type(strategy).__name__
    strategy = STRATEGIES.build(strategy, {}) if isinstance(strategy, str) else strategy
    try:
        strategy.check_solver(solver)
    except UserError as error:
        raise UserError(f"strategy {name!r} {error}") from None
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
        own = keys[indices.start : indices.stop]
        batch = Batch(ensemble, part, own, x_shape, seed, guidance_scale, on_evaluation=advance)
        batches.append(strategy.generate(batch, times, solver).cpu())
        if progress is not None:
            progress(indices.stop)
    return torch.cat(batches)
