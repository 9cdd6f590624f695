"""Base of the members' LightningModules: a training step from its batch to the curves. ``roles`` has the losses."""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.encoders.interfaces import CaptionEncoder
from ddm_lightning.encoders.stored import StoredForm
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate, velocity_loss_weights
from ddm_lightning.flow.randomness import keyed_generator, keyed_seed
from ddm_lightning.flow.timesteps import sample_timesteps, stratified_timesteps
from ddm_lightning.members.member import Member
from ddm_lightning.networks.attention import check_attention, set_attention
from ddm_lightning.networks.compiled import compile_blocks
from ddm_lightning.training.ema import ema_weights, track_ema
from ddm_lightning.training.guard import FiniteGuard
from ddm_lightning.training.optimizer import build_optimizer, build_schedule, clip_in_step
from ddm_lightning.training.parallel import HALF, Sharded, checkpoint_blocks, shard_blocks
from ddm_lightning.training.speed import Speed

NUM_VALIDATION_TIMESTEPS = 8
LOG_EVERY_N_STEPS = 50
"""Reporting interval under a Trainer that does not log."""


@dataclass(frozen=True)
class NoisyBatch:
    """A batch on the member's path between data and noise; ``t`` is the path's time."""

    x_t: Float[Tensor, "b c h w"]
    t: Float[Tensor, " b"]
    noise: Float[Tensor, "b c h w"]
    x_0: Float[Tensor, "b c h w"]
    condition: Condition | None

    def rows(self, rows: slice) -> NoisyBatch:
        """Return some of the samples."""
        condition = None if self.condition is None else self.condition.rows(rows)
        return NoisyBatch(self.x_t[rows], self.t[rows], self.noise[rows], self.x_0[rows], condition)


class MemberModule(L.LightningModule):
    """Base of the experts' and the router's modules.

    All randomness of a step (timesteps, noise, dropped conditions, dropout within the network) is keyed by seed,
    member, global rank and step. So ranks differ, and a resumed run neither repeats nor skips any. The batches that a
    Trainer accumulates gradients over differ, too.

    Curves are averaged on the device and logged at the Trainer's ``log_every_n_steps``; no other step makes the host
    wait for the device.

    Args:
        network: the built network; ``configure_model`` shards and compiles it.
        member: its role, clusters and training settings.
        stored: how the shards hold ``x_0``.
        island: attention, compilation, checkpointing and micro batches on this machine; defaults if None.
        caption_encoder: encodes captions during training; None if the shards hold the result.
        num_held_out: held-out samples of its clusters; None to count every row of a held-out batch.
    """

    loss_name = "loss"
    """Name of the loss in curves."""

    def __init__(
        self,
        network: nn.Module,
        member: Member,
        stored: StoredForm,
        *,
        island: IslandConfig | None = None,
        caption_encoder: CaptionEncoder | None = None,
        num_held_out: int | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.member = member
        self.stored = stored
        self.island = island or IslandConfig()
        self.caption_encoder = caption_encoder
        self.num_held_out = num_held_out
        self.speed = Speed(member.batch_size)
        self.averages: dict[str, float] = {}
        """Training averages of the newest report."""
        self.replayed: tuple[int, int] | None = None
        """Rank and step that key the randomness, instead of the Trainer's."""
        self._configured = False
        self._parameters_to_clip: list[nn.Parameter] = []
        self._sums: dict[str, Tensor] = {}
        self._guard: FiniteGuard | None = None
        self._micro_batch = 0

    def configure_model(self) -> None:
        """Apply the island's settings to the network: attention, activation checkpointing, compilation, sharding."""
        if self._configured:
            return
        self._configured = True
        set_attention(self.network, self.island.attention)
        if self._trainer is not None:
            with self.trainer.precision_plugin.forward_context():
                check_attention(self.island.attention, self.trainer.strategy.root_device)
        if self.island.activation_checkpointing:
            checkpoint_blocks(self.network)
        if self.island.compile:
            compile_blocks(self.network)
        if self._trainer is not None and isinstance(self.trainer.strategy, Sharded):
            mesh, gathered = self.device_mesh, self.trainer.strategy.gathered
            assert mesh is not None  # Lightning makes it
            shard_blocks(self.network, mesh["data_parallel"], gathered=gathered, half=self.trainer.precision in HALF)

    def configure_optimizers(self) -> Any:
        """Build AdamW or Muon with the EMAs in its state, and the learning-rate schedule."""
        optimizer = build_optimizer(self.network, self.member.train)
        track_ema(optimizer, self.member.train.ema_decay, self.member.train.ema_widths)
        schedule = build_schedule(optimizer, self.member.train)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        """Start the clock."""
        # ``drain`` has summed over ranks, but Lightning cannot know.
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self.log\(.*sync_dist=True\)`.*")
        self.speed.start(self.global_step)

    # A training step, from its batch to the curves.

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Key the global generator, which a network's own dropout uses, by the step."""
        self.speed.end_wait()
        self._micro_batch = batch_idx % getattr(self._trainer, "accumulate_grad_batches", 1)  # a replay has no Trainer
        _seed(keyed_seed(self.member.seed, *self._key("network")), self.device)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch. With micro batches: accumulate gradients, return the last one's loss."""
        noisy = self.noisy_batch(batch)
        micro_batches = self._micro_batches(len(noisy.t))
        if len(micro_batches) == 1:
            losses = self.compute_losses(noisy, batch)
            loss = self.weighted(losses, noisy.t).mean()
        else:
            losses, loss = self._accumulate_gradients(noisy, batch, micro_batches)
        if self.trainer.scaler is None:  # under ``16-mixed`` the gradient scaler skips steps
            self.guard.record(self.global_step, batch["sample_id"], noisy.t, losses["loss"])
        for name, values in losses.items():
            self.accumulate(f"train/{self.loss_name if name == 'loss' else name}", values.mean())
        self._accumulate_by_time(noisy.t, losses["loss"].detach())
        return loss

    def noisy_batch(self, batch: dict[str, Tensor]) -> NoisyBatch:
        """Sample this step's timesteps, noise and dropped conditions for a batch."""
        config, device = self.member.timesteps, batch["x_0"].device
        generator = keyed_generator(self.member.seed, *self._key("noise"), device=device)
        stored = batch["x_0"]
        if self.member.train.horizontal_flip:
            flipped = torch.rand(len(stored), generator=generator, device=device) < 0.5
            # A mirrored latent is not the latent of the mirrored image, so take that one if the shards hold it.
            mirrored = batch["x_0_flipped"] if "x_0_flipped" in batch else stored.flip(-1)
            stored = torch.where(flipped[:, None, None, None], mirrored, stored)
        x_0 = self.stored.sample(stored, generator)
        t = sample_timesteps(len(x_0), config.density, config.mean, config.std, config.shift, generator, device)
        noise = torch.randn(x_0.shape, generator=generator, device=device)
        condition = self.condition(batch)
        if condition is not None:
            dropped = torch.rand(len(x_0), generator=generator, device=device) < self.member.condition_dropout
            condition = condition.dropped(dropped)
        return NoisyBatch(interpolate(x_0, noise, t, self.member.path), t, noise, x_0, condition)

    def compute_losses(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        """Return ``loss`` of each sample, in fp32, and further figures to show as curves."""
        raise NotImplementedError

    def weighted(self, losses: dict[str, Float[Tensor, " b"]], t: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Weight ``loss`` for training; curves show it unweighted."""
        if self.member.loss == "velocity":
            return losses["loss"] * velocity_loss_weights(t, self.prediction, self.member.path)
        return losses["loss"]

    def _micro_batches(self, num: int) -> list[slice]:
        """Split a batch into nearly equal micro batches, so that compiled blocks see at most two sizes."""
        num_parts = 1 if self.island.micro_batch_size is None else math.ceil(num / self.island.micro_batch_size)
        edges = [num * part // num_parts for part in range(num_parts + 1)]
        return [slice(*pair) for pair in itertools.pairwise(edges)]

    def _accumulate_gradients(
        self, noisy: NoisyBatch, batch: dict[str, Tensor], micro_batches: list[slice]
    ) -> tuple[dict[str, Float[Tensor, " b"]], Float[Tensor, ""]]:
        """Compute the losses one micro batch at a time; the last one's loss is returned with its graph.

        Timesteps, noise and dropped conditions are those of the whole batch, and Lightning sees one step. Gradients
        are reduced once, in the last backward pass; FSDP2 must be told.
        """
        found: list[dict[str, Tensor]] = []

        def loss_of(rows: slice) -> Float[Tensor, ""]:
            losses = self.compute_losses(noisy.rows(rows), {name: values[rows] for name, values in batch.items()})
            found.append({name: values.detach() for name, values in losses.items()})
            return self.weighted(losses, noisy.t[rows]).sum() / len(noisy.t)

        def reduce_gradients(now: bool) -> None:
            if isinstance(self.network, FSDPModule):
                self.network.set_requires_gradient_sync(now)

        *first, last = micro_batches
        reduce_gradients(False)
        for rows in first:
            loss = loss_of(rows)
            with torch.autocast(self.device.type, enabled=False):  # backward uses the forward pass's dtypes
                self.trainer.strategy.backward(loss, None)
        reduce_gradients(True)
        loss = loss_of(last)
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}, loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip by the global norm, also of sharded gradients, in the step; skip the step if it is not finite."""
        if self.trainer.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            # A fused optimizer unscales within its step, which comes later: the limit would be of scaled gradients.
            self.trainer.scaler.unscale_(optimizer)
        if not self._parameters_to_clip:
            self._parameters_to_clip = list(self.parameters())  # walks through all modules, so only once
        norm = clip_in_step(optimizer, self._parameters_to_clip, self.member.train.gradient_clip_norm)
        self.accumulate("train/gradient_norm", norm)
        if self.trainer.scaler is None:
            self.guard.judge(optimizer, norm)

    @property
    def prediction(self) -> str:
        """Prediction type that an expert's network declares."""
        return getattr(self.network, "prediction", "velocity")

    @property
    def guard(self) -> FiniteGuard:
        """Guard that skips steps whose gradient is not finite."""
        if self._guard is None:
            self._guard = FiniteGuard(self.member.name, self.global_rank, self.member.train.max_skipped_steps)
        return self._guard

    def optimizer_step(self, *args: Any, **named: Any) -> None:
        """Take the step, then free the gradients: neither a validation nor the next forward pass needs them."""
        super().optimizer_step(*args, **named)
        for parameter in self._parameters_to_clip:
            parameter.grad = None

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Do nothing: Lightning calls this after ``training_step``, which has accumulated gradients by then."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Log the curves when they are due; from here on the loop waits for the next batch."""
        if self.logs_now():
            self.log_curves()
        self.speed.begin_wait()

    def on_train_epoch_end(self) -> None:
        """Log the steps since the last report if these were the last steps of the training."""
        if self.trainer.should_stop or self.global_step >= self.trainer.max_steps:
            self.log_curves()

    # Curves.

    def logs_now(self) -> bool:
        """Whether the curves are due after this step."""
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]  # a connector of the Trainer sets it
        return self.global_step % (every or LOG_EVERY_N_STEPS) == 0

    def log_curves(self) -> None:
        """Log the averages since the last call, the learning rate and the speed; a second call in a step does nothing.

        The host waits for the device here. With several ranks this is a collective.

        Raises:
            UserError: the guard skipped too many consecutive steps.
        """
        self.guard.settle()
        if averages := self.drain("train/"):
            self.averages = {**averages, "train/skipped_steps": float(self.guard.num_skipped)}
            learning_rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            speed = self.speed.read(self.global_step)
            self.log_figures({**self.averages, "train/learning_rate": learning_rate, **speed})

    def log_figures(self, figures: dict[str, float]) -> None:
        """Log figures of this step."""
        # Lightning takes the x-axis from "step"; its own counter is one behind.
        self.log_dict({**figures, "step": float(self.global_step)})

    def accumulate(self, name: str, value: Float[Tensor, "*times"], count: int | Tensor = 1) -> None:
        """Add values to a running average on the device, unless they are not finite.

        Args:
            name: of the average; ends in ``_by_time`` for a row of averages, one per timestep.
            value: the sum of the values, or one sum per timestep.
            count: number of values in a sum.
        """
        value = value.detach().float()
        finite = value.isfinite()
        pair = torch.stack([torch.where(finite, value, 0.0), finite * count])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def _accumulate_by_time(self, t: Float[Tensor, " b"], losses: Float[Tensor, " b"]) -> None:
        """Average the training loss over equal parts of [0, 1], whose middles are the validation timesteps."""
        part = torch.arange(NUM_VALIDATION_TIMESTEPS, device=t.device)[:, None]
        within = (t * NUM_VALIDATION_TIMESTEPS).long().clamp(max=NUM_VALIDATION_TIMESTEPS - 1) == part
        self.accumulate(f"train/{self.loss_name}_by_time", torch.where(within, losses, 0.0).sum(1), within.sum(1))

    def drain(self, prefix: str) -> dict[str, float]:
        """Return and reset the averages over all ranks whose names start with ``prefix``; empty ones are missing.

        The host waits for the device here. With several ranks this is a collective, and all need the same names.
        """
        drained = {name: self._sums.pop(name) for name in sorted(self._sums) if name.startswith(prefix)}
        if not drained:
            return {}
        table = torch.cat([pair.view(2, -1) for pair in drained.values()], dim=1)
        if self._num_ranks() > 1:
            torch.distributed.all_reduce(table)
        sums, counts = table.tolist()
        names = [one for name, pair in drained.items() for one in _names(name, pair.view(2, -1).shape[1])]
        return {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count}

    # Validation.

    def on_validation_start(self) -> None:
        """Swap in the averaged weights, which the artifact will hold."""
        self.speed.pause()
        self._swap = ema_weights(self.network, self.trainer.optimizers[0])
        self._swap.__enter__()

    def noisy_validation_batch(self, batch: dict[str, Tensor], batch_idx: int, index: int) -> NoisyBatch:
        """Return the batch at the ``index``-th of 8 fixed timesteps, with noise that never changes.

        Curves of one and of eight devices are comparable: each rank generates the noise of the whole step and takes the
        rows of its own samples. The ranks' samples alternate in a step (``shards.datamodule.steps``).
        """
        x_0 = self.normalised(batch)
        time = stratified_timesteps(NUM_VALIDATION_TIMESTEPS)[index].item()
        t = torch.full((len(x_0),), time, device=x_0.device)  # a copy would wait for the device
        generator = keyed_generator(self.member.seed, "validation", batch_idx, index, 0, device=x_0.device)
        # In full even for a smaller batch: the values may depend on their number.
        noise = torch.randn((self.member.batch_size, *x_0.shape[1:]), generator=generator, device=x_0.device)
        noise = noise[self.global_rank :: self._num_ranks()][: len(x_0)]
        return NoisyBatch(interpolate(x_0, noise, t, self.member.path), t, noise, x_0, self.condition(batch))

    def num_counted(self, batch: dict[str, Tensor], batch_idx: int) -> int:
        """Return how many rows of a held-out batch count; they come first.

        Ranks that cannot share the held-out samples equally repeat some (``shards.datamodule.steps``), each as its last
        row. It is computed like the others, because ranks wait for one another under FSDP2.
        """
        num = len(batch["sample_id"])
        if self.num_held_out is None:
            return num
        first = batch_idx * self.member.batch_size + self.global_rank
        return min(num, len(range(first, self.num_held_out, self._num_ranks())))

    def on_validation_epoch_end(self) -> None:
        """Log the held-out averages, unless the validation was cut short; swap the training weights back.

        A ``ModelCheckpoint`` saves after this, in ``on_validation_end``.
        """
        held_out = self.drain("held_out/")
        if held_out and not self.trainer.should_stop:
            self.log_figures(held_out)
        self._swap.__exit__(None, None, None)

    def on_validation_end(self) -> None:
        """Count training time again."""
        self.speed.resume()

    # Parts of both steps.

    def normalised(self, batch: dict[str, Tensor]) -> Float[Tensor, "b c h w"]:
        """Return ``x_0`` of a batch, or the mean of a stored posterior, in fp32 and the networks' units."""
        return self.stored.mean(batch["x_0"])

    def condition(self, batch: dict[str, Tensor]) -> Condition | None:
        """Return the condition of a batch, without dropout."""
        kind, encoder = self.member.condition.kind, self.caption_encoder
        if kind == "none":
            return None
        if kind == "class":
            return Condition.of(batch["label"])
        if kind == "tokens":
            return Condition.of(batch["text_tokens"] if encoder is None else encoder.tokens_of_stored(batch))
        if "text" not in batch and encoder is not None:
            return Condition.of(encoder.vectors_of_stored(batch))
        return Condition.of(batch["text"])

    def _num_ranks(self) -> int:
        return 1 if self._trainer is None else self.trainer.world_size

    def _key(self, purpose: str) -> tuple[int | str, ...]:
        rank, step = self.replayed or (self.global_rank, self.global_step)
        # The first micro batch has the key of a step without accumulation.
        return self.member.name, purpose, rank, step, *([self._micro_batch] if self._micro_batch else [])


def _seed(seed: int, device: torch.device) -> None:
    """Seed only the generators in use: ``torch.manual_seed`` takes a millisecond per kind of idle device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def time_suffix(index: int, num: int = NUM_VALIDATION_TIMESTEPS) -> str:
    """Ends the names of curves at the ``index``-th of ``num`` timesteps, as in ``_t0.062``."""
    return f"_t{(index + 0.5) / num:.3f}"


def _names(name: str, num: int) -> list[str]:
    return [name] if num == 1 else [f"{name.removesuffix('_by_time')}{time_suffix(index, num)}" for index in range(num)]
