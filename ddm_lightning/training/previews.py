"""Loggers, and the images of validations: samples of an expert, or a heat map of the router."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import lightning as L
import numpy as np
import torch
from jaxtyping import Float
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure
from torch import Tensor

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.environment import ALONE, Ranks
from ddm_lightning.core.errors import first_line, say
from ddm_lightning.core.files import create_file
from ddm_lightning.core.grids import heat_map, labelled_grid, scale_of
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import guided, interpolate, time_rows, velocity_of, x_0_from_velocity
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.solvers.built_in import Euler
from ddm_lightning.flow.timesteps import sampling_times
from ddm_lightning.members.member import Member
from ddm_lightning.members.run import Run
from ddm_lightning.training.callbacks import StopOnRequest
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import Classification, Objective
from ddm_lightning.training.prompts import encoded_prompts
from ddm_lightning.use.rows import Rows, rows_without_prompts

NUM_COLUMNS = 8


class GroupingLogger(TensorBoardLogger):
    """TensorBoard with the curves in groups, what to watch first; see ``tensorboard_tag``."""

    @cached_property
    def experiment(self) -> Any:
        """The writer. It names its file after those of earlier starts, whose clocks may have been ahead.

        TensorBoard reads files in the order of their names, which hold the time.
        """
        from tensorboard.summary.writer import event_file_writer

        names = []
        for path in Path(self.log_dir).glob("events.out.tfevents.*"):
            names.append(path.name.split("."))

        later = max([time.time(), *(int(parts[3]) + 1 for parts in names if parts[3].isdecimal())])
        own = get_ident()  # the writer's thread needs the time
        event_file_writer.time = SimpleNamespace(time=lambda: later if get_ident() == own else time.time())
        try:
            return super().experiment
        finally:
            event_file_writer.time = time

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log figures under their tags."""
        super().log_metrics({tensorboard_tag(name): value for name, value in metrics.items()}, step)


def tensorboard_tag(name: str) -> str:
    """Put the curve or image ``name`` into a group; TensorBoard sorts groups by the part before the first slash."""
    kind, _, figure = name.rpartition("/")
    if re.search(r"_\d+x\d+$", figure):  # of one bucket
        return f"5_by_shape/{name}"
    if "_t0." in figure:  # at one timestep
        return f"4_by_noise_level/{name}"
    if figure.startswith(("cross_entropy", "accuracy", "routing")):
        return f"2_router/{name}"
    if name == "samples":
        return "1_watch/validation/samples"  # sorted behind the losses: each member has a card of its own
    if figure == "loss":
        return f"1_watch/{name}"
    if kind == "train":
        return f"3_training/{name}"

    return name


def build_loggers(names: list[str], folder: Path, project: str, resumed_step: int) -> list[Logger]:
    """Build the loggers of a member.

    Args:
        names: ``tensorboard``, ``csv`` or ``wandb``.
        folder: the member's folder; each logger has a folder of its own in it.
        project: the project's name in Weights & Biases.
        resumed_step: step of the checkpoint to resume from; 0 for none.
    """
    purge_step = None
    if resumed_step:
        purge_step = resumed_step + 1

    builders: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: GroupingLogger(folder, name="", version="tensorboard", purge_step=purge_step),
        # A file per start: the logger would overwrite that of an earlier one.
        "csv": lambda: CSVLogger(folder / "csv", "", f"from-step-{resumed_step:08d}", flush_logs_every_n_steps=1),
        # All starts of a member are one run, on whatever machine.
        "wandb": lambda: WandbLogger(
            folder.name, folder, project=project, group=folder.name, id=_wandb_id(folder), resume="allow"
        ),
    }
    return [builders[name]() for name in names]


def _wandb_id(folder: Path) -> str:
    """The member's name in Weights & Biases, made at its first start."""
    path = folder / "wandb.txt"  # published with the curves
    with suppress(FileExistsError):
        create_file(path, f"{folder.name}-{uuid4().hex[:12]}".encode())

    return path.read_text(encoding="utf-8")


def log_image(trainer: L.Trainer, name: str, image: np.ndarray[Any, Any] | Figure) -> None:
    """Show an image ``[h w 3]`` or a figure in every logger that takes images."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [image], trainer.global_step)
        elif isinstance(logger, TensorBoardLogger) and isinstance(image, Figure):
            logger.experiment.add_figure(tensorboard_tag(name), image, trainer.global_step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tensorboard_tag(name), image, trainer.global_step, dataformats="HWC")


def fixed_rows(member: Member, run: Run, mine: Ranks = ALONE) -> Rows | None:
    """Return rows of the first of ``sample.prompts``, of the first classes, or one for no condition.

    A router, an expert of some noise levels and a run without encoded prompts have no rows.
    """
    if member.role.classifies or member.interval != (0.0, 1.0):
        return None
    if member.condition.kind in ("class", "none"):
        classes = range(member.condition.size)[:NUM_COLUMNS]
        return rows_without_prompts(classes, run.manifest.class_names, member.condition)

    return encoded_prompts(run, mine)


def noise_of_rows(rows: Rows, seed: int, x_shape: Sequence[int]) -> tuple[Float[Tensor, "num c h w"], Condition | None]:
    """Return noise and conditions of equally many images per row, as the command ``sample`` has them."""
    num_rows = len(rows.labels)
    num = NUM_COLUMNS // num_rows
    noise = []
    for number in range(num * num_rows):
        generator = keyed_generator(seed, "x_1", *rows.key(number, num))
        noise.append(torch.randn(x_shape, generator=generator))

    places = torch.arange(len(noise)) // num
    return torch.stack(noise), rows.condition and rows.condition.rows(places)


class SampleLogger(L.Callback):
    """Logs images at each validation: held-out images above samples of an expert, or the router's heat map.

    With buckets, a row of samples of each one follows the first one's held-out images.

    It runs before the module swaps its training weights back, so it samples with the averaged weights. An image that
    cannot be made ends training only where other ranks may wait for this one.

    Args:
        sample: solver steps and guidance.
        stop: cuts sampling short.
        rows: what to sample; none for one row under the conditions of the held-out images.
    """

    def __init__(self, sample: SampleConfig, stop: StopOnRequest, rows: Rows | None = None) -> None:
        self.sample = sample
        self.stop = stop
        self.rows = rows
        self._batches: dict[Bucket | None, dict[str, Tensor]] = {}

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the first held-out batch of each bucket for its images and conditions."""
        if batch_idx == 0:
            self._batches = {}

        assert isinstance(module, MemberModule)
        bucket = module.objective.bucket(batch)
        if bucket not in self._batches:
            self._batches[bucket] = {name: value[:NUM_COLUMNS] for name, value in batch.items()}

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Log the images; every rank samples, as a sharded network needs all, and rank zero decodes and logs."""
        shows = any(isinstance(logger, TensorBoardLogger | WandbLogger) for logger in trainer.loggers)
        if trainer.should_stop or not shows or not self._batches:
            return

        assert isinstance(module, MemberModule)
        made: list[Tensor] | None = None
        try:
            if isinstance(module.objective, Classification):
                made = [module.objective.sum_confusion(trainer.world_size)]
            else:
                made = self._sampled(module)

            if trainer.is_global_zero:
                self._log(trainer, module.objective, made)
        except StopIteration:
            return
        except Exception as error:
            if made is None and trainer.world_size > 1:  # other ranks may wait for this one
                raise

            step = f"{module.member.name}: step {trainer.global_step}"
            say(f"{step}: no images of this validation: {first_line(error)}")

    def _sampled(self, module: MemberModule) -> list[Float[Tensor, "b c h w"]]:
        """Sample the fixed rows, or a held-out batch, of each bucket; ``StopIteration`` ends the validation."""

        def network(*inputs: Any) -> Tensor:
            self.stop.on_validation_batch_start(module.trainer)
            # The precision of a validation step: sharded weights may exist in bfloat16 only.
            with module.trainer.precision_plugin.forward_context():
                return module.network(*inputs).float()

        batches = self._batches.values()
        return [sample_like(module.objective, network, batch, self.sample, self.rows) for batch in batches]

    def _log(self, trainer: L.Trainer, objective: Objective, made: Sequence[Tensor]) -> None:
        if isinstance(objective, Classification):
            log_image(trainer, "held_out/routing", routing_heat_map(made[0].cpu()))
            return

        coder = objective.member.image_encoder
        encoder = IMAGE_ENCODERS.build(coder.name, coder.params)  # built anew: takes no memory between validations
        first = next(iter(self._batches.values()))
        held_out = list(encoder.decode(objective.x_0(first).float().cpu()))
        rows = [("held out", held_out)]
        for bucket, x_0 in zip(self._batches, made, strict=True):
            labels = self.rows.labels if self.rows else ["sampled"]
            if bucket:
                labels = [bucket.name]

            sampled = np.split(encoder.decode(x_0.float().cpu()), len(labels))
            rows += zip(labels, map(list, sampled), strict=True)

        log_image(trainer, "samples", np.asarray(labelled_grid(rows, scale_of(held_out[0]))))


def sample_like(
    objective: Objective,
    network: Callable[..., Tensor],
    batch: dict[str, Tensor],
    sample: SampleConfig,
    rows: Rows | None = None,
) -> Float[Tensor, "num c h w"]:
    """Sample ``rows``, or under the conditions of ``batch``, by Euler steps.

    An expert of some noise levels denoises the batch itself, from its highest level to its estimate at the lowest.

    Args:
        objective: of the member.
        network: evaluates the objective's network.
        batch: conditions, and the shape of the samples.
        sample: number of steps and guidance.
        rows: what to sample instead.
    """
    x_0 = objective.x_0(batch)  # its shape; a stored posterior has twice the channels
    condition = objective.condition(batch)
    scale = sample.guidance_scale
    member = objective.member
    shape = (x_0.shape[1], x_0.shape[2], x_0.shape[3])
    if rows:
        if shape != member.x_shape:
            rows = replace(rows, x_shape=shape)

        noise, condition = noise_of_rows(rows, member.seed, shape)
        noise = x_0 = noise.to(x_0)
        condition = condition and condition.to(x_0.device)
    else:
        generator = keyed_generator(member.seed, "images", device=x_0.device)
        noise = torch.randn(x_0.shape, generator=generator, device=x_0.device)

    def predicted(x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return velocity_of(network, x_t, t, condition, objective.prediction, member.path)

    def velocity(x_t: Tensor, t: Tensor) -> Tensor:
        found = predicted(x_t, t, condition)
        if condition is None or scale == 1:
            return found

        return guided(found, predicted(x_t, t, condition.null()), scale)

    low, high = member.interval
    times = sampling_times(sample.num_steps, member.shift_for(shape)).clamp(low, high).unique().flip(0)
    x_t = Euler().solve(velocity, interpolate(x_0, noise, time_rows(high, noise)), times)
    end = time_rows(low, noise)
    if low > 0:
        return x_0_from_velocity(x_t, velocity(x_t, end), end)

    return x_t


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
