"""What every member's LightningModule does: noising, optimiser, EMA, clipping, device-side averages."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ddm_lightning.config import IslandConfig
from ddm_lightning.encoders.interfaces import CaptionEncoder
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator, keyed_seed
from ddm_lightning.flow.timesteps import sample_timesteps, stratified_timesteps
from ddm_lightning.members.member import Member
from ddm_lightning.networks.attention import check_attention, set_attention
from ddm_lightning.shards.manifest import StoredForm
from ddm_lightning.training.ema import ema_weights, track_ema
from ddm_lightning.training.guard import FiniteGuard
from ddm_lightning.training.optimizer import build_optimizer, build_schedule
from ddm_lightning.training.parallel.strategy import HALF, Sharded, checkpoint_blocks, compile_blocks, shard_blocks

NUM_VALIDATION_TIMESTEPS = 8


@dataclass(frozen=True)
class Noised:
    """A batch on the path between data and noise."""

    x_t: Float[Tensor, "b c h w"]
    t: Float[Tensor, " b"]
    noise: Float[Tensor, "b c h w"]
    x_0: Float[Tensor, "b c h w"]
    condition: Condition | None

    def rows(self, rows: slice) -> Noised:
        """Some of the samples."""
        condition = None if self.condition is None else self.condition.rows(rows)
        return Noised(self.x_t[rows], self.t[rows], self.noise[rows], self.x_0[rows], condition)


class MemberModule(L.LightningModule):
    """Base of the experts' and the router's modules.

    All randomness of a step (timesteps, noise, dropped conditions, the network's own dropout) is keyed by
    (seed, member, global rank, step): ranks differ, and a resumed run repeats nothing and skips nothing. Batches that a
    Trainer accumulates over differ, too.

    Args:
        network: the built network; sharding and compilation are applied to it in ``configure_model``.
        member: what it is and how it trains.
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
        self._configured = False
        self._clipped: list[nn.Parameter] = []
        self._sums: dict[str, Tensor] = {}
        self._guard: FiniteGuard | None = None
        self._micro_batch = 0
        self.replayed: tuple[int, int] | None = None
        """Rank and step whose randomness is drawn, in place of the Trainer's."""

    def configure_model(self) -> None:
        """Apply the island's choices to the network: attention, compiled blocks, shards."""
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
            mesh = self.device_mesh
            assert mesh is not None  # Lightning makes it
            shard_blocks(
                self.network,
                mesh["data_parallel"],
                gathered=self.trainer.strategy.gathered,
                half=self.trainer.precision in HALF,
            )

    def configure_optimizers(self) -> Any:
        """AdamW or Muon with the EMAs in its state, and the learning-rate schedule."""
        optimizer = build_optimizer(self.network, self.member.train)
        track_ema(optimizer, self.member.train.ema_decay, self.member.train.ema_widths)
        schedule = build_schedule(optimizer, self.member.train)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def guard(self) -> FiniteGuard:
        """What leaves out steps whose gradient is not finite."""
        if self._guard is None:
            self._guard = FiniteGuard(self.member.name, self.global_rank, self.member.train.max_skipped_steps)
        return self._guard

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip by the global norm, also of sharded gradients; a step without a finite one is left out."""
        limit = self.member.train.gradient_clip_norm
        if self.trainer.scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            # Lightning leaves that to fused kernels, which do it behind this: the limit would be of scaled gradients.
            self.trainer.scaler.unscale_(optimizer)
        if not self._clipped:
            self._clipped = list(self.network.parameters())  # a walk through all modules: once
        # An infinite limit measures without clipping.
        norm = nn.utils.clip_grad_norm_(self._clipped, float("inf") if limit is None else limit)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.accumulate("train/gradient_norm", norm)
        if self._judges_steps():
            self.guard.judge(optimizer, norm)

    def _judges_steps(self) -> bool:
        """Not where a gradient scaler of 16-bit floats looks for its scale by steps that it leaves out itself."""
        return self.trainer.scaler is None

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Key the global generator (a network's own dropout) by the step."""
        self._micro_batch = batch_idx % getattr(self._trainer, "accumulate_grad_batches", 1)  # a replay has no Trainer
        _seed(keyed_seed(self.member.seed, *self._key("network")), self.device)

    def noised(self, batch: dict[str, Tensor]) -> Noised:
        """Draw this step's timesteps, noise and dropped conditions for a batch."""
        config, device = self.member.timesteps, batch["x_0"].device
        generator = self._generator("noise", device)
        stored = batch["x_0"]
        if self.member.train.horizontal_flip:
            flipped = torch.rand(len(stored), generator=generator, device=device) < 0.5
            # The encoding of the mirrored picture where the shards have it: a mirrored latent is not the same.
            mirrored = batch["x_0_flipped"] if "x_0_flipped" in batch else stored.flip(-1)
            stored = torch.where(flipped[:, None, None, None], mirrored, stored)
        x_0 = self.stored.draw(stored, generator)
        t = sample_timesteps(
            len(x_0), config.density, config.mean, config.std, config.shift, generator=generator, device=device
        )
        noise = torch.randn(x_0.shape, generator=generator, device=device)
        condition = self.condition(batch)
        if condition is not None:
            condition = condition.dropped(
                torch.rand(len(x_0), generator=generator, device=device) < self.member.condition_dropout
            )
        return Noised(interpolate(x_0, noise, t), t, noise, x_0, condition)

    def measure(self, noised: Noised, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        """``loss`` of each sample, fp32, and what else a subclass shows a curve of."""
        raise NotImplementedError

    def weighted(self, losses: Float[Tensor, " b"], t: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """The losses as they count in training; curves show them as they are."""
        return losses

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of one batch, or of the last part of it when the gradients of the others are there already."""
        noised = self.noised(batch)
        parts = self._parts(len(noised.t))
        if len(parts) == 1:
            measured = self.measure(noised, batch)
            loss = self.weighted(measured["loss"], noised.t).mean()
        else:
            measured, loss = self._measure_parts(noised, batch, parts)
        if self._judges_steps():
            self.guard.saw(self.global_step, batch["sample_id"], noised.t, measured["loss"])
        for name, values in measured.items():
            self.accumulate(f"train/{self.loss_name if name == 'loss' else name}", values.mean())
        self._accumulate_by_time(noised.t, measured["loss"].detach())
        return loss

    def _parts(self, num: int) -> list[slice]:
        """Of nearly equal size, so that compiled blocks see two sizes at most."""
        num_parts = 1 if self.island.micro_batch_size is None else math.ceil(num / self.island.micro_batch_size)
        edges = [num * part // num_parts for part in range(num_parts + 1)]
        return [slice(*pair) for pair in itertools.pairwise(edges)]

    def _measure_parts(
        self, noised: Noised, batch: dict[str, Tensor], parts: list[slice]
    ) -> tuple[dict[str, Float[Tensor, " b"]], Float[Tensor, ""]]:
        """``measure`` part by part, one part's activations at a time: gradient accumulation within the step.

        Times, noise and dropped conditions were drawn for the whole step and Lightning sees one step, so that samples,
        noise, callbacks and checkpoints are those of a step in one part. Ranks reduce gradients in the last backward
        pass alone: DDP by itself, FSDP2 keeps whole gradients until then.
        """
        found: list[dict[str, Tensor]] = []

        def loss_of(rows: slice) -> Float[Tensor, ""]:
            measured = self.measure(noised.rows(rows), {name: values[rows] for name, values in batch.items()})
            found.append({name: values.detach() for name, values in measured.items()})
            return self.weighted(measured["loss"], noised.t[rows]).sum() / len(noised.t)

        def reduce_gradients(now: bool) -> None:
            if isinstance(self.network, FSDPModule):
                self.network.set_requires_gradient_sync(now)

        *first, last = parts
        reduce_gradients(False)
        for rows in first:
            loss = loss_of(rows)
            with torch.autocast(self.device.type, enabled=False):  # a backward pass takes its types from the forward
                self.trainer.strategy.backward(loss, None)
        reduce_gradients(True)
        loss = loss_of(last)
        return {name: torch.cat([one[name] for one in found]) for name in found[0]}, loss

    def optimizer_step(self, *args: Any, **named: Any) -> None:
        """Gradients are freed behind the step: neither a validation nor the next forward pass has to hold them."""
        super().optimizer_step(*args, **named)
        for parameter in self._clipped:
            parameter.grad = None

    def optimizer_zero_grad(self, *_: Any) -> None:
        """Nothing: Lightning asks for it behind ``training_step``, in which parts of a step leave their gradients."""

    def _accumulate_by_time(self, t: Float[Tensor, " b"], losses: Float[Tensor, " b"]) -> None:
        """Training loss in as many equal parts of [0, 1] as validation has timesteps, at whose middles those lie."""
        part = torch.arange(NUM_VALIDATION_TIMESTEPS, device=t.device)[:, None]
        within = (t * NUM_VALIDATION_TIMESTEPS).long().clamp(max=NUM_VALIDATION_TIMESTEPS - 1) == part
        self.accumulate(f"train/{self.loss_name}_by_time", torch.where(within, losses, 0.0).sum(1), within.sum(1))

    def validation_noised(self, batch: dict[str, Tensor], batch_idx: int, index: int) -> Noised:
        """The batch at the ``index``-th of 8 fixed timesteps, with noise that never changes.

        Not with the number of ranks either, so that curves of one and of eight devices compare: a rank draws the noise
        of a whole step, in which the ranks' samples take turns (``shards.loader.steps``), and takes its own. Of a step
        that is not full, too: what is drawn may depend on how much is.
        """
        x_0 = self.normalised(batch)
        t = stratified_timesteps(NUM_VALIDATION_TIMESTEPS)[index].to(x_0.device).expand(len(x_0))
        # The 0 was a rank once: what was measured before still compares.
        generator = keyed_generator(self.member.seed, "validation", batch_idx, index, 0, device=x_0.device)
        noise = torch.randn((self.member.batch_size, *x_0.shape[1:]), generator=generator, device=x_0.device)
        noise = noise[self.global_rank :: self._num_ranks()][: len(x_0)]
        return Noised(interpolate(x_0, noise, t), t, noise, x_0, self.condition(batch))

    def num_counted(self, batch: dict[str, Tensor], batch_idx: int) -> int:
        """How many rows of a held-out batch count: the first ones.

        Ranks that cannot share the held-out samples equally see some once more (``shards.loader.steps``), each as its
        last row. It is computed as the others are, because under FSDP ranks wait for one another.
        """
        num = len(batch["sample_id"])
        if self.num_held_out is None:
            return num
        first = batch_idx * self.member.batch_size + self.global_rank
        return min(num, len(range(first, self.num_held_out, self._num_ranks())))

    def _num_ranks(self) -> int:
        return 1 if self._trainer is None else self.trainer.world_size

    def normalised(self, batch: dict[str, Tensor]) -> Float[Tensor, "b c h w"]:
        """``x_0`` of a batch, or its mean where a posterior is stored, in fp32 and the units that networks model."""
        return self.stored.mean(batch["x_0"])

    def condition(self, batch: dict[str, Tensor]) -> Condition | None:
        """The condition of a batch, nothing dropped."""
        if self.member.condition.kind == "none":
            return None
        if self.member.condition.kind == "class":
            return Condition.of(batch["label"])
        encoder = self.caption_encoder
        if self.member.condition.kind == "tokens":
            return Condition.of(batch["text_tokens"] if encoder is None else encoder.tokens_of_stored(batch))
        if "text" not in batch and encoder is not None:
            return Condition.of(encoder.vectors_of_stored(batch))
        return Condition.of(batch["text"])

    def accumulate(self, name: str, value: Float[Tensor, "*times"], count: int | Tensor = 1) -> None:
        """Add a sum of ``count`` values to a running average, without leaving the device; not if it is not finite.

        Args:
            name: of the average; of a row of averages, one a timestep, the name ends in ``_by_time``.
            value: the sum, or sums.
            count: how many values are summed.
        """
        value = value.detach().float()
        finite = value.isfinite()
        pair = torch.stack([torch.where(finite, value, 0.0), finite * count])
        self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def drain(self, prefix: str) -> dict[str, float]:
        """The averages over all ranks of what was accumulated under ``prefix``, reset; without those of no value.

        Here the host waits for the device; a collective, for which every rank has to have the same names.
        """
        drained = {name: self._sums.pop(name) for name in sorted(self._sums) if name.startswith(prefix)}
        if not drained:
            return {}
        table = torch.cat([pair.view(2, -1) for pair in drained.values()], dim=1)
        if self._trainer is not None and self.trainer.world_size > 1:
            torch.distributed.all_reduce(table)
        sums, counts = table.tolist()
        names = [one for name, pair in drained.items() for one in _names(name, pair.view(2, -1).shape[1])]
        return {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count}

    def ema_weights(self) -> Any:
        """Context in which the network carries its averaged weights."""
        return ema_weights(self.network, self.trainer.optimizers[0])

    def on_validation_start(self) -> None:
        """Validate the averaged weights: they are what the artifact will hold."""
        self._swap = self.ema_weights()
        self._swap.__enter__()

    def on_validation_end(self) -> None:
        """Take the training weights back."""
        self._swap.__exit__(None, None, None)

    def on_validation_epoch_end(self) -> None:
        """Average over the ranks what was held out; ``Reporter`` logs it (Lightning itself would one step early)."""
        self.log_dict(self.drain("held_out/"), logger=False)

    def _generator(self, purpose: str, device: torch.device) -> torch.Generator:
        return keyed_generator(self.member.seed, *self._key(purpose), device=device)

    def _key(self, purpose: str) -> tuple[int | str, ...]:
        rank, step = self.replayed or (self.global_rank, self.global_step)
        # The first micro batch has the key of a step without others.
        return self.member.name, purpose, rank, step, *([self._micro_batch] if self._micro_batch else [])


def _seed(seed: int, device: torch.device) -> None:
    """``torch.manual_seed`` for a step on ``device``: on hosts whose GPU is not in use it costs a millisecond.

    For each kind of device that is not started it writes down the whole call stack.
    """
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _names(name: str, num: int) -> list[str]:
    if num == 1:
        return [name]
    return [f"{name.removesuffix('_by_time')}_t{(index + 0.5) / num:.3f}" for index in range(num)]
