"""What validations show: samples of an expert and their scores, or a heat map of the router."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from torch import Tensor

from ddm_lightning.config.experiment import EvaluateConfig, SampleConfig
from ddm_lightning.core.errors import UserError, first_line, line_of
from ddm_lightning.core.grids import heat_map, labelled_grid
from ddm_lightning.core.registry import IMAGE_ENCODERS, METRICS
from ddm_lightning.core.scores import scores_of
from ddm_lightning.encoders.interfaces import ImageEncoder
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import guided, velocity_of
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.solvers.fixed_steps import Euler
from ddm_lightning.flow.timesteps import sampling_times
from ddm_lightning.members.member import Member
from ddm_lightning.training.callbacks import StopOnRequest
from ddm_lightning.training.loggers import log_image
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import Classification, Objective

NUM_COLUMNS = 8
MAX_IMAGES = 512
"""Maximum number of samples per score, as training waits for them."""


class CutShortError(Exception):
    """The validation must end while samples are generated."""


class SampleLogger(L.Callback):
    """Logs images at each validation: held-out images above samples of an expert, or the router's heat map.

    It runs before the module swaps its training weights back, so it samples with the averaged weights. An image that
    cannot be made ends training only where other ranks may wait for this one.

    Args:
        member: the member.
        sample: solver steps and guidance.
        stop: cuts sampling short.
    """

    def __init__(self, member: Member, sample: SampleConfig, stop: StopOnRequest) -> None:
        self.member, self.sample, self.stop = member, sample, stop
        self._batch: dict[str, Tensor] | None = None
        self._is_off = False

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Build the decoder once, on rank zero; if that fails no rank samples."""
        self._is_off = not any(isinstance(logger, TensorBoardLogger | WandbLogger) for logger in trainer.loggers)
        if self._is_off or self.member.role.classifies:
            return
        if trainer.is_global_zero:
            try:
                self.encoder()
            except Exception as error:  # noqa: BLE001  # an image must not end a training
                self._is_off = True
                self.print(f"trains without sample images: {first_line(error)}")
        self._is_off = trainer.strategy.broadcast(self._is_off)

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the first held-out batch for its images and conditions."""
        if batch_idx == 0:
            self._batch = {name: value[:NUM_COLUMNS] for name, value in batch.items()}

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Log the images; every rank samples, as a sharded network needs all, and rank zero decodes and logs."""
        if trainer.should_stop or self._is_off:
            return
        assert isinstance(module, MemberModule)
        if isinstance(module.objective, Classification):
            confusion = module.objective.sum_confusion(trainer.world_size)
            if trainer.is_global_zero and confusion is not None:
                with self.forgiving(trainer, "images of this validation"):
                    log_image(trainer, "held_out/routing", routing_heat_map(confusion.cpu()))
        elif self._batch is not None:
            sampled: Tensor | None = None
            with self.forgiving(trainer, "images of this validation", together=True):
                sampled = self.sampled(module, self._batch)
            if trainer.is_global_zero and sampled is not None:
                with self.forgiving(trainer, "images of this validation"):
                    self._log_samples(trainer, module, self._batch, sampled)

    def _log_samples(
        self, trainer: L.Trainer, module: MemberModule, batch: dict[str, Tensor], sampled: Float[Tensor, "b c h w"]
    ) -> None:
        encoder = self.encoder()  # built anew, so that it takes no memory between validations
        rows = [
            (name, list(encoder.decode(x_0.float().cpu())))
            for name, x_0 in (("held out", module.objective.x_0(batch)), ("sampled", sampled))
        ]
        log_image(trainer, "samples", np.asarray(labelled_grid(rows)))

    @contextmanager
    def forgiving(self, trainer: L.Trainer, missing: str, *, together: bool = False) -> Iterator[None]:
        """Print an error of the block instead of ending the training.

        Args:
            trainer: the Trainer.
            missing: what the error leaves out, for the line.
            together: whether several ranks work together in the block. An error then ends them all, because the others
                may wait for this one.
        """
        try:
            yield
        except CutShortError:
            return
        except Exception as error:
            if together and trainer.world_size > 1:
                if line := line_of(error):
                    raise UserError(
                        f"{self.member.name}: step {trainer.global_step}: rank {trainer.global_rank} cannot make "
                        f"{missing}: {line}; or train without: island.loggers=[csv] and "
                        "island.evaluate_every_n_steps=null"
                    ) from error
                raise
            self.print(f"step {trainer.global_step}: no {missing}: {first_line(error)}")

    def sampled(
        self, module: MemberModule, batch: dict[str, Tensor], key: tuple[str | int, ...] = ("images",)
    ) -> Float[Tensor, "b c h w"]:
        """Sample under the conditions of ``batch``, with noise keyed by ``key`` and the rank.

        Raises:
            CutShortError: the validation must end.
        """

        @contextmanager
        def evaluating() -> Iterator[None]:
            if self.stop.cuts_validation(module.trainer):
                raise CutShortError
            # The precision of a validation step: sharded weights may exist in bfloat16 only.
            with module.trainer.precision_plugin.forward_context():
                yield

        key = (*key, module.global_rank) if module.global_rank else key
        return sample_like(module.objective, batch, self.sample, key, evaluating)

    def encoder(self) -> ImageEncoder:
        """Build the decoder."""
        return IMAGE_ENCODERS.build(self.member.image_encoder.name, self.member.image_encoder.params)

    def print(self, line: str) -> None:
        """Print a line about the member."""
        print(f"{self.member.name}: {line}", file=sys.stderr)


class ScoreLogger(L.Callback):
    """Logs ``evaluate.metrics`` at every N-th step, as part of a validation.

    Samples under the conditions of held-out samples, with the averaged weights and noise of their own, are compared
    with these samples: at most ``evaluate.num_images`` and ``MAX_IMAGES``. Metrics that need captions are skipped.
    Every rank scores its own samples, and the metrics reduce over ranks.

    Args:
        sampler: generates the samples.
        evaluate: metrics and number of images.
        every_n_steps: steps between scores.

    Raises:
        UserError: a metric refuses its params.
    """

    def __init__(self, sampler: SampleLogger, evaluate: EvaluateConfig, every_n_steps: int) -> None:
        built = [(plugin.name, METRICS.build(plugin.name, plugin.params)) for plugin in evaluate.metrics]
        self.metrics = [(name, metric) for name, metric in built if not hasattr(metric, "captioned")]
        self.sampler, self.every_n_steps = sampler, every_n_steps
        self.num_images = min(evaluate.num_images, MAX_IMAGES)
        self._batches: list[tuple[dict[str, Tensor], int]] = []

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Find the weights of the feature networks before the first step."""
        for _, metric in self.metrics:
            getattr(metric.to(trainer.strategy.root_device), "network", None)

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep held-out batches of a validation that is scored."""
        assert isinstance(module, MemberModule)
        self._batches = self._batches if batch_idx else []
        first = batch_idx * module.member.batch_size  # counts all ranks, which must sample alike
        if trainer.global_step % self.every_n_steps == 0 and first < self.num_images:
            num = -(-(self.num_images - first) // trainer.world_size)
            self._batches.append((batch, min(num, module.objective.num_counted(batch, batch_idx, module.position()))))

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Sample and log the scores."""
        batches, self._batches = self._batches, []
        if trainer.should_stop or not batches:
            return
        assert isinstance(module, MemberModule)
        forgiving, samples, is_whole = self.sampler.forgiving, list[Tensor](), False
        with forgiving(trainer, "scores", together=True):
            for number, (batch, _) in enumerate(batches):
                samples.append(self.sampler.sampled(module, batch, ("scores", number)).float().cpu())
        if len(samples) < len(batches):
            return
        with forgiving(trainer, "scores"):
            encoder = self.sampler.encoder()
            for (batch, num), sampled in zip(batches, samples, strict=True):
                for real, x_0 in ((True, module.objective.x_0(batch).float().cpu()), (False, sampled)):
                    images = encoder.decode(x_0)[:num]
                    for _, metric in self.metrics:
                        metric.update(images, real=real)
            is_whole = True
        if not self.sampler.stop.any_rank(not is_whole):  # metrics reduce over ranks
            with forgiving(trainer, "scores"):
                found = [scores_of(name, metric) for name, metric in self.metrics]
                module.log_figures({f"score/{key}": score.value for one in found for key, score in one.items()})
        for _, metric in self.metrics:
            metric.reset()


def sample_like(
    objective: Objective,
    batch: dict[str, Tensor],
    sample: SampleConfig,
    key: tuple[str | int, ...],
    evaluating: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Float[Tensor, "b c h w"]:
    """Sample under the conditions of ``batch`` by Euler steps.

    Args:
        objective: with the network.
        batch: conditions, and the shape of the samples.
        sample: number of steps and guidance.
        key: keys the noise, with the member's seed.
        evaluating: makes the context of each evaluation of the network.
    """
    x_0 = objective.x_0(batch)  # its shape; a stored posterior has twice the channels
    condition, scale = objective.condition(batch), sample.guidance_scale

    def network(*inputs: Any) -> Tensor:
        with evaluating():
            return objective.network(*inputs).float()

    def predicted(x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return velocity_of(network, x_t, t, condition, objective.prediction, objective.member.path)

    def velocity(x_t: Tensor, t: Tensor) -> Tensor:
        found = predicted(x_t, t, condition)
        if condition is None or scale == 1:
            return found
        return guided(found, predicted(x_t, t, condition.null()), scale)

    generator = keyed_generator(objective.member.seed, *key, device=x_0.device)
    noise = torch.randn(x_0.shape, generator=generator, device=x_0.device)
    times = sampling_times(sample.num_steps, objective.member.timesteps.shift, device=x_0.device)
    return Euler().solve(velocity, noise, times)


def routing_heat_map(confusion: Float[Tensor, "t k k"]) -> Figure:
    """Draw a panel per timestep: true clusters downwards, the mean probability of each cluster across."""
    num_times = len(confusion)
    figure = Figure(figsize=(2.1 * num_times, 2.6), layout="constrained")
    shares = (confusion / confusion.sum(2, keepdim=True).clamp_min(1e-9)).numpy()
    for index, axis in enumerate(figure.subplots(1, num_times, squeeze=False)[0]):
        heat_map(axis, shares[index], shares[index], ".2f", vmin=0, vmax=1, cmap="viridis")
        axis.set(title=f"t = {(index + 0.5) / num_times:.2f}", xlabel="routed to")
    figure.get_axes()[0].set_ylabel("true cluster", fontsize=8)
    return figure
