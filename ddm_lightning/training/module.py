"""The LightningModule of every member: runs an ``Objective`` in a Trainer, builds the optimizer, logs the curves."""

from __future__ import annotations

import itertools
import math
import resource
import sys
import time
from contextlib import ExitStack
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.members.cost import HALF, UNKNOWN_COST, StepCost
from ddm_lightning.networks.attention import check_attention
from ddm_lightning.shards.manifest import IMAGE_COLUMNS
from ddm_lightning.training.compact import CompactAdamW
from ddm_lightning.training.ema import HOST_STEPS, check_float32, ema_weights, track_ema
from ddm_lightning.training.guard import FiniteGuard
from ddm_lightning.training.objective import (
    NUM_VALIDATION_TIMESTEPS,
    Averages,
    NoisyBatch,
    Objective,
    Position,
    time_suffix,
)
from ddm_lightning.training.optimizer import build_optimizer, build_schedule, clip_in_step
from ddm_lightning.training.parallel import Sharded, apply_island, halve_weights, shard_blocks


class MemberModule(L.LightningModule):
    """A member in training.

    Curves are averaged on the device and logged at the Trainer's ``log_every_n_steps``; no other step makes the host
    wait for the device.

    Args:
        objective: the network and its losses; ``configure_model`` shards and compiles the network.
        island: attention, compilation, activation checkpointing and micro batches here; defaults if None.
    """

    def __init__(self, objective: Objective, island: IslandConfig | None = None) -> None:
        super().__init__()
        self.objective = objective
        self.network = objective.network
        self.member = objective.member
        self.island = island or IslandConfig()
        self.speed = Speed(self.member.batch_size)
        self.guard = FiniteGuard(self.member.name, self.member.train.max_skipped_steps)
        self.averages: dict[str, float] = {}
        """Training averages that were logged last."""
        self._running = Averages()
        indices = range(NUM_VALIDATION_TIMESTEPS)
        self._names_by_time = [f"train/{objective.loss_name}{time_suffix(index)}" for index in indices]
        self._parameters_to_clip: list[nn.Parameter] = []
        self._averaged_weights = ExitStack()
        self._untried = max(self.member.buckets, key=lambda bucket: math.prod(bucket.x_shape), default=None)

    def configure_model(self) -> None:
        """Apply the island's settings to the network, and shard it under FSDP2.

        Raises:
            UserError: its weights are not float32, or an attention kernel does not run.
        """
        check_float32(self.network)
        if self.island.precision == "bf16-true":
            halve_weights(self.network)

        strategy = self.trainer.strategy
        with self.trainer.precision_plugin.forward_context():
            check_attention(self.island.attention, strategy.root_device)

        apply_island(self.network, self.island)
        if isinstance(strategy, Sharded):
            mesh = self.device_mesh
            assert mesh is not None  # Lightning makes it
            # "tensor_parallel" is Lightning's name for the devices of a node; several nodes hold copies of the shards.
            shard_blocks(
                self.network,
                mesh if self.island.nodes > 1 else mesh["tensor_parallel"],
                reshard_after_forward=strategy.reshard_after_forward,
                half=self.trainer.precision in HALF,
            )

    def configure_optimizers(self) -> Any:
        """Build the optimizer with the EMAs in its state, and the learning-rate schedule."""
        train = self.member.train
        optimizer = build_optimizer(self.network, train, (self.member.seed, self.member.name))
        track_ema(
            optimizer,
            train.ema_decay,
            train.ema_widths,
            from_initial=self.member.init_from is not None,
            every=HOST_STEPS if self.island.ema == "host" else 0,
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": build_schedule(optimizer, train), "interval": "step"},
        }

    def position(self, batch_idx: int = 0) -> Position:
        """Return the place of a batch in the training."""
        return Position(
            self.global_step,
            self.global_rank,
            self.trainer.world_size,
            part=batch_idx % self.trainer.accumulate_grad_batches,
        )

    # A training step, from its batch to the curves.

    def on_train_start(self) -> None:
        self._parameters_to_clip = list(self.parameters())  # walks through all modules, so only once
        self.speed.start(self.global_step)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss of a batch. With micro batches: accumulate gradients, return the last one's loss."""
        self.speed.end_wait()
        position = self.position(batch_idx)
        if self.trainer.optimizers[0].state and self._untried is not None:
            self._try(self._untried, batch, position)
            self._untried = None

        self.objective.seed_network(position, self.device)
        noisy = self.objective.noisy_batch(batch, position)
        micro_batches = self._micro_batches(len(noisy.t))
        if len(micro_batches) == 1:
            losses = self.objective.compute_losses(noisy, batch)
            loss = self.objective.weighted(losses, noisy.t).mean()
        else:
            losses, loss = self._accumulate_gradients(noisy, batch, micro_batches)

        if self.trainer.scaler is None:  # under ``16-mixed`` the gradient scaler skips steps
            self.guard.record(batch["sample_id"], noisy.t, losses["loss"])

        for name, values in losses.items():
            shown = self.objective.loss_name if name == "loss" else name
            self._running.add(values.mean(), f"train/{shown}")

        self._add_by_time(noisy.t, losses["loss"].detach())
        return loss

    def _try(self, bucket: Bucket, batch: dict[str, Tensor], position: Position) -> None:
        """Run forward and backward on zeros of a bucket's shape, so that a memory too small ends training here.

        The optimizer's moments and the averages are in memory by now. Nothing is left: gradients are dropped, and all
        random numbers are keyed.
        """
        zeros = dict(batch)
        for name in batch.keys() & IMAGE_COLUMNS:
            zeros[name] = batch[name].new_zeros(*batch[name].shape[:2], *bucket.x_shape[1:])

        rows = self._micro_batches(len(batch["sample_id"]))[0]
        noisy = self.objective.noisy_batch(zeros, position).rows(rows)
        losses = self.objective.compute_losses(noisy, {name: values[rows] for name, values in zeros.items()})
        with torch.autocast(self.device.type, enabled=False):
            self.trainer.strategy.backward(losses["loss"].sum(), None)

        self._drop_gradients()

    def _micro_batches(self, num_samples: int) -> list[slice]:
        """Split a batch into nearly equal micro batches, so that compiled blocks see at most two sizes."""
        num_parts = math.ceil(num_samples / (self.island.micro_batch_size or num_samples))
        edges = [num_samples * part // num_parts for part in range(num_parts + 1)]
        return [slice(*pair) for pair in itertools.pairwise(edges)]

    def _accumulate_gradients(
        self, noisy: NoisyBatch, batch: dict[str, Tensor], micro_batches: list[slice]
    ) -> tuple[dict[str, Float[Tensor, " b"]], Float[Tensor, ""]]:
        """Compute the losses one micro batch at a time; the last one's loss is returned with its graph.

        Timesteps, noise and dropped conditions are those of the whole batch, and Lightning sees one step. Gradients
        are reduced once, in the last backward pass; FSDP2 must be told.
        """
        found: list[dict[str, Tensor]] = []
        loss = noisy.t.new_zeros(())
        for rows in micro_batches:
            is_last = rows is micro_batches[-1]
            if isinstance(self.network, FSDPModule):
                self.network.set_requires_gradient_sync(is_last)

            part = {name: values[rows] for name, values in batch.items()}
            losses = self.objective.compute_losses(noisy.rows(rows), part)
            found.append({name: values.detach() for name, values in losses.items()})
            loss = self.objective.weighted(losses, noisy.t[rows]).sum() / len(noisy.t)
            if not is_last:
                with torch.autocast(self.device.type, enabled=False):  # backward uses the forward pass's dtypes
                    self.trainer.strategy.backward(loss, None)

        return {name: torch.cat([one[name] for one in found]) for name in found[0]}, loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Let the step clip by the global norm, also of sharded gradients; skip it if the norm is not finite."""
        scaler = self.trainer.scaler
        if scaler is not None and isinstance(optimizer, AdamW | CompactAdamW):
            # A fused optimizer unscales within its step, too late: the norm would be that of scaled gradients.
            scaler.unscale_(optimizer)

        norm = clip_in_step(optimizer, self._parameters_to_clip, self.member.train.gradient_clip_norm)
        self._running.add(norm, "train/gradient_norm")
        if scaler is None:
            self.guard.skip_unless_finite(self.global_step, self.global_rank, optimizer, norm)

    def optimizer_step(self, *args: Any, **named: Any) -> None:
        """Take the step, then free the gradients: neither a validation nor the next forward pass needs them."""
        super().optimizer_step(*args, **named)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
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
        return self.global_step % self.trainer.log_every_n_steps == 0  # type: ignore[attr-defined]  # a connector sets it

    def log_curves(self) -> None:
        """Log the averages since the last call, the learning rate and the speed; a second call in a step does nothing.

        The host waits for the device here. With several ranks this is a collective.

        Raises:
            UserError: the guard skipped too many consecutive steps.
        """
        self.guard.find_skipped()
        if averages := self._running.drain(self.trainer.world_size):
            self.averages = {**averages, "train/skipped_steps": float(self.guard.num_skipped)}
            learning_rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            speed = self.speed.read(self.global_step)
            self.log_figures({**self.averages, "train/learning_rate": learning_rate, **speed})

    def log_figures(self, figures: dict[str, float]) -> None:
        """Log figures of this step."""
        # Lightning takes the x-axis from "step"; its own counter is one behind.
        self.log_dict({**figures, "step": float(self.global_step)})

    def _add_by_time(self, t: Float[Tensor, " b"], losses: Float[Tensor, " b"]) -> None:
        """Average the training loss over equal parts of [0, 1], whose middles are the validation timesteps."""
        part = torch.arange(NUM_VALIDATION_TIMESTEPS, device=t.device)[:, None]
        within = (t * NUM_VALIDATION_TIMESTEPS).long().clamp(max=NUM_VALIDATION_TIMESTEPS - 1) == part
        sums = torch.where(within, losses, 0.0).sum(1)
        self._running.add(sums, *self._names_by_time, count=within.sum(1))

    # Validation.

    def on_validation_start(self) -> None:
        """Swap in the averaged weights, which the artifact will hold."""
        self.speed.pause()
        self.objective.start_validation()
        if self.trainer.optimizers:  # not in ``Trainer.validate``, which takes the weights as they are
            self._averaged_weights.enter_context(ema_weights(self.network, self.trainer.optimizers[0]))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.objective.validate(batch, batch_idx, self.position())

    def on_validation_epoch_end(self) -> None:
        """Log the held-out averages, unless the validation was cut short; swap the training weights back.

        A ``ModelCheckpoint`` saves later, in ``on_validation_end``, and so saves the training weights.
        """
        held_out = self.objective.held_out_figures(self.trainer.world_size)
        if held_out and not self.trainer.should_stop:
            self.log_figures(held_out)

        self._averaged_weights.close()

    def on_validation_end(self) -> None:
        """Count training time again."""
        self.speed.resume()


class Speed:
    """Clock of a training: measures the steps since the last report, excluding validations.

    It reads the host's clock. Over the time between two reports that is the device's time too, because a report waits
    for the device.

    Args:
        samples_per_step: samples of an optimizer step, over all devices.
        cost: of one sample.
    """

    def __init__(self, samples_per_step: int, cost: StepCost = UNKNOWN_COST) -> None:
        self.samples_per_step = samples_per_step
        self.cost = cost
        self._step_ended = math.inf  # nothing waits for the first batch
        self.start(0)

    def start(self, step: int) -> None:
        """Start measuring after optimizer step ``step``."""
        self._began = time.perf_counter()
        self._first_step = step
        self._waited = self._paused = 0.0

    def begin_wait(self) -> None:
        """Note that a step has ended: the loop waits for the next batch."""
        self._step_ended = time.perf_counter()

    def end_wait(self) -> None:
        """Note that the batch is there."""
        self._waited += max(0.0, time.perf_counter() - self._step_ended)

    def pause(self) -> None:
        """Stop the clock for a validation."""
        self._pause_began = time.perf_counter()

    def resume(self) -> None:
        """Restart the clock after a validation."""
        self._step_ended = time.perf_counter()
        self._paused += self._step_ended - self._pause_began

    def read(self, step: int) -> dict[str, float]:
        """Return the curves' values since the last report, and start anew; empty if no step was taken."""
        elapsed = time.perf_counter() - self._began - self._paused
        num_steps = step - self._first_step
        if num_steps <= 0 or elapsed <= 0:
            return {}

        rate = num_steps * self.samples_per_step / elapsed
        figures = {
            "train/samples_per_second": rate,
            "train/data_wait": min(1.0, self._waited / elapsed),
            "train/memory_gb": peak_memory_bytes() / 1e9,
        }
        if self.cost.peak_flops is not None:
            figures["train/mfu"] = rate * self.cost.flops / self.cost.peak_flops
            figures["train/hfu"] = rate * (self.cost.flops + self.cost.recomputed_flops) / self.cost.peak_flops

        self.start(step)
        return figures


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held: of its GPU, or of the host without one."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return most

    return most * 1024
