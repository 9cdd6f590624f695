"""What people look at while a member trains: sample grids and routing heat maps, in TensorBoard."""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from torch import Tensor

from ddm_lightning.config import SampleConfig
from ddm_lightning.core.errors import first_line
from ddm_lightning.core.grids import labelled_grid
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.encoders.interfaces import ImageEncoder
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import VelocityField, guided, to_velocity
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.solvers import integrate
from ddm_lightning.flow.timesteps import sampling_times
from ddm_lightning.members.member import Member
from ddm_lightning.training.callbacks import StopOnRequest
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.router import RouterModule

NUM_COLUMNS = 8


class _CutShortError(Exception):
    """Sampling is to end at once."""


class PictureLogger(L.Callback):
    """At each validation: held-out pictures above samples under their conditions, or the router's heat map.

    It runs before the module takes its training weights back, so what is seen is what the artifact holds. Training
    goes on without them where they cannot be drawn.
    """

    def __init__(self, member: Member, sample: SampleConfig, stop: StopOnRequest) -> None:
        self.member, self.sample = member, sample
        self.stop = stop
        self._batch: dict[str, Tensor] | None = None
        self._is_off = False

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Look for the decoder now, on the first rank; without it all of them draw nothing."""
        if isinstance(module, RouterModule):
            return
        if trainer.is_global_zero:
            try:
                self._encoder()
            except Exception as error:  # noqa: BLE001  # no image is worth a training
                self._is_off = True
                _say(module, f"trains without sample images in TensorBoard: {first_line(error)}")
        self._is_off = trainer.strategy.broadcast(self._is_off)

    def _encoder(self) -> ImageEncoder:
        plugin = self.member.image_encoder
        encoder: ImageEncoder = IMAGE_ENCODERS.build(plugin.name, plugin.params)
        return encoder

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the first held-out batch for its pictures and conditions."""
        if batch_idx == 0:
            self._batch = {name: value[:NUM_COLUMNS] for name, value in batch.items()}

    @torch.no_grad()
    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Draw; every rank samples (a sharded network needs all), the first one decodes and logs."""
        if trainer.should_stop or self._is_off:
            return
        try:
            self._draw(trainer, module)
        except Exception as error:  # noqa: BLE001  # no image is worth a training
            _say(module, f"step {trainer.global_step}: no images of this validation: {first_line(error)}")

    def _draw(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        logger = trainer.logger
        if isinstance(module, RouterModule):
            if trainer.is_global_zero and isinstance(logger, TensorBoardLogger) and module.confusion is not None:
                figure = routing_heat_map(module.confusion.cpu())
                logger.experiment.add_figure("held_out/routing", figure, trainer.global_step)
            return
        assert isinstance(module, MemberModule)
        if self._batch is None:
            return
        try:
            sampled = self._sampled(module)
        except _CutShortError:
            return
        if not (trainer.is_global_zero and isinstance(logger, TensorBoardLogger)):
            return
        encoder = self._encoder()  # anew: between validations its memory is the step's
        rows = [
            (name, list(encoder.decode(x_0.float().cpu())))
            for name, x_0 in (("held out", module.normalised(self._batch)), ("sampled", sampled))
        ]
        grid = np.asarray(labelled_grid(rows))
        logger.experiment.add_image("samples", grid, trainer.global_step, dataformats="HWC")

    def _sampled(self, module: MemberModule) -> Float[Tensor, "b c h w"]:
        assert self._batch is not None
        x_0 = module.normalised(self._batch)  # what is modelled: shards may hold a posterior, of twice the channels
        shape, device = x_0.shape, x_0.device
        condition = module.condition(self._batch)
        kind = getattr(module.network, "prediction", "velocity")
        scale = self.sample.guidance_scale

        def predicted(x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
            if self.stop.cuts_validation(module.trainer):
                raise _CutShortError
            # As in a validation step: sharded weights may be there in bfloat16 alone.
            with module.trainer.precision_plugin.forward_context():
                return to_velocity(module.network(x_t, t, condition).float(), x_t, t, kind)

        def velocity(x_t: Tensor, t: Tensor) -> Tensor:
            found = predicted(x_t, t, condition)
            if condition is None or scale == 1:
                return found
            return guided(found, predicted(x_t, t, condition.null()), scale)

        field: VelocityField = velocity
        noise = torch.randn(
            shape, generator=keyed_generator(self.member.seed, "pictures", device=device), device=device
        )
        times = sampling_times(self.sample.num_steps, self.member.timesteps.shift, device=device)
        return integrate(field, noise, times)


def _say(module: L.LightningModule, line: str) -> None:
    assert isinstance(module, MemberModule)
    print(f"{module.member.name}: {line}", file=sys.stderr)


def routing_heat_map(confusion: Float[Tensor, "t k k"]) -> Figure:
    """A panel a timestep: rows are the true clusters, columns the mean probability of being routed there."""
    num_times, num_clusters, _ = confusion.shape
    figure = Figure(figsize=(2.1 * num_times, 2.6), layout="constrained")
    for index, axis in enumerate(figure.subplots(1, num_times, squeeze=False)[0]):
        rows = confusion[index] / confusion[index].sum(1, keepdim=True).clamp_min(1e-9)
        axis.imshow(rows.numpy(), vmin=0, vmax=1, cmap="viridis")
        axis.set_title(f"t = {(index + 0.5) / num_times:.2f}", fontsize=9)
        axis.set_xticks(range(num_clusters))
        axis.set_yticks(range(num_clusters))
        axis.set_xlabel("routed to", fontsize=8)
        for row in range(num_clusters):
            for column in range(num_clusters):
                share = float(rows[row, column])
                axis.text(
                    column, row, f"{share:.2f}", ha="center", va="center", fontsize=6, color="w" if share < 0.6 else "k"
                )
    figure.get_axes()[0].set_ylabel("true cluster", fontsize=8)
    return figure
