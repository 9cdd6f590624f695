"""Generate samples with any routing strategy; experts that return NaN are excluded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.ensemble.routing import Batch, Key, Trace, strategy_of
from ddm_lightning.ensemble.velocity import Ensemble, NotFiniteError
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.solvers import OnStep, Solver, unchanged
from ddm_lightning.flow.timesteps import sampling_times


@torch.no_grad()
def sample(
    ensemble: Ensemble,
    condition: Condition | None,
    num: int,
    x_shape: tuple[int, int, int],
    settings: SampleConfig,
    *,
    shift: float,
    seed: int | Sequence[int],
    batch_size: int,
    keys: Sequence[Key] | None = None,
    progress: Callable[[float], object] | None = None,
    trace: Trace | None = None,
    clusters: Int[Tensor, " num"] | None = None,
    negative: Condition | None = None,
    x_1: Float[Tensor, "num c h w"] | None = None,
    image: Float[Tensor, "num c h w"] | None = None,
    strength: float = 1.0,
    on_step_end: OnStep = unchanged,
) -> Float[Tensor, "num c h w"]:
    """Generate ``num`` samples.

    All noise of sample i depends on (``seed``, ``keys[i]``, ``x_shape``) alone: its x_1, the noise of each ancestral
    step and the numbers by which ``bayes`` chooses experts. Bit for bit, it does not depend on the other samples,
    ``num``, ``batch_size``, device, strategy or solver.

    On a CPU the sample itself does not depend on its batch either, bit for bit (``networks.rows``). This is so in
    float32, uncompiled, with 1 or 2 threads, for networks whose widths are multiples of 32, on the linear path.
    Elsewhere it is equal to 1e-4 only, because operations round differently for another number of rows; a choice of
    expert that is tied to within rounding may flip.

    Args:
        ensemble: the experts, on the device that samples.
        condition: one per sample, or None for the null condition in all.
        num: number of samples.
        x_shape: channels, height and width of one sample.
        settings: strategy, solver, steps, guidance, ``compile`` and ``precision``.
        shift: resolution shift of the times, as recorded in the experts' artifacts.
        seed: seed of all noise, or one per sample.
        batch_size: samples computed at once.
        keys: key of each sample's noise, such as ``("red apple", 0)``; None for its number.
        progress: called with the number of finished samples, fractional, after every evaluation and batch.
        trace: keeps the sampling trajectory; None records nothing and costs nothing.
        clusters: cluster of the image that each condition describes, on the CPU, for the strategy ``oracle``.
        negative: one per sample, to take the place of the null condition in guidance, in experts and router; None is
            the null condition. See ``Ensemble.velocity``.
        x_1: noise at t = 1, instead of that of ``seed`` and ``keys``. Other noise, such as that of ancestral steps,
            stays theirs.
        image: x_0 to start from, in the value range that the experts model (SDEdit, Meng et al., 2108.01073). Only the
            last ``int(num_steps·strength)`` steps are run, at least one, from the noisy image at the first of their
            times. A strategy that chooses the expert once draws it from the router at the noisy image.
        strength: above 0 and at most 1, which ignores ``image``.
        on_step_end: called as ``on_step_end(step, t, x_t)`` after each step of each batch, with the step's number from
            0, the time that it reached and x_t, [b c h w], on the ensemble's device. What it returns replaces x_t.
            ``dormand-prince`` chooses its own steps and calls it once, at the end. Samples that an expert fails on are
            generated again, and then it is called for these alone.

    Returns:
        x_0, float32, on the CPU, in the value range that the experts model.

    Raises:
        UserError: unknown strategy or solver, a pair that does not work together, no router, options that do not
            go together, or noise or seeds of other sizes.
    """
    if not 0 < strength <= 1:
        raise UserError(f"strength = {strength}: give a number above 0 and at most 1")
    if not isinstance(seed, int) and len(seed) != num:
        raise UserError(f"{len(seed)} seeds for {num} images: give one, or one per image")
    if x_1 is not None and x_1.shape != (num, *x_shape):
        raise UserError(
            f"latents has shape {list(x_1.shape)}; give {[num, *x_shape]}, one per image; height and width change it"
        )
    if x_1 is not None and not x_1.isfinite().all():
        raise UserError("latents has numbers that are not finite; give finite ones")

    solver: Solver = SOLVERS.build(settings.solver, settings.solver_params)
    strategy = strategy_of(settings)
    strategy.check_solver(settings.solver)
    if keys is None:
        keys = [(i,) for i in range(num)]

    ensemble.precision = settings.precision
    if settings.compile:
        ensemble.compile()

    times = sampling_times(settings.num_steps, shift)
    num_skipped = 0
    if image is not None:
        num_skipped = settings.num_steps - max(1, int(settings.num_steps * strength))

    skipped_times = times[: num_skipped + 1].tolist()
    times = times[num_skipped:]
    done: list[Tensor] = [torch.empty(0, *x_shape)]
    rows = range(0)

    def advance(t: Tensor) -> None:
        if progress is not None:
            steps_done = int((times > t.max().cpu()).sum())
            progress(rows.start + len(rows) * steps_done / (len(times) - 1))

    def generate(ensemble: Ensemble, chosen: Sequence[int]) -> Tensor:
        indices = torch.tensor(chosen)
        batch = Batch(
            ensemble,
            condition and condition.rows(indices),
            [keys[row] for row in chosen],
            x_shape,
            seed if isinstance(seed, int) else [seed[row] for row in chosen],
            settings,
            on_evaluation=advance,
            trace=trace,
            clusters=None if clusters is None else clusters[indices],
            negative=negative and negative.rows(indices),
            own_noise=None if x_1 is None else x_1[indices],
            image=image[indices] if image is not None and num_skipped else None,
            skipped_times=skipped_times,
            on_step=on_step_end,
        )
        x_0 = strategy.generate(batch, times, solver).cpu()
        if trace is not None:
            trace.end(times, x_0)

        return x_0

    for first in range(0, num, batch_size):
        rows = range(first, min(first + batch_size, num))
        x_0 = generate(ensemble, rows)
        if not x_0.isfinite().all():  # on the CPU anyway, so that no step costs more
            x_0 = _without_failed(ensemble, generate, rows, x_0)

        done.append(x_0)
        if progress is not None:
            progress(rows.stop)

    ensemble.work.images[x_shape] += num
    return torch.cat(done)


def _without_failed(
    ensemble: Ensemble,
    generate: Callable[[Ensemble, Sequence[int]], Float[Tensor, "r c h w"]],
    rows: Sequence[int],
    x_0: Float[Tensor, "r c h w"],
) -> Float[Tensor, "r c h w"]:
    """Generate samples that are not finite again, with the same noise and without the experts that failed.

    Only this second attempt checks each expert's output. The weights of the other experts are renormalised. A failure
    is noted on stderr once per ensemble.

    Args:
        ensemble: the ensemble.
        generate: generates samples of the given rows with the given ensemble, on the CPU.
        rows: the samples that were generated.
        x_0: the finished samples; changed in place.

    Raises:
        UserError: no expert is left for the strategy, or the router fails.
    """
    excluded = set[int]()
    broken = (~x_0.isfinite().flatten(1).all(1)).nonzero().squeeze(1)
    while len(broken):
        try:
            x_0[broken] = generate(ensemble.watched(excluded), [rows[i] for i in broken.tolist()])
            break
        except NotFiniteError as error:
            cluster, name = error.args
            if cluster in excluded or len(excluded) == ensemble.num_clusters - 1:
                raise UserError(f"{name}: returns NaN, and the strategy has no other expert; fit it again") from None
            if cluster not in ensemble.failed:
                note(f"{name} returns NaN on {len(broken)} images; they are made without it, with renormalised weights")

            ensemble.failed.add(cluster)
            excluded.add(cluster)

    return x_0
