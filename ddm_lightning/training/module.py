"""What every member's LightningModule does: noising, optimiser, EMA, clipping, device-side averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from jaxtyping import Float
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn

from ddm_lightning.config import TimestepsConfig, TrainConfig
from ddm_lightning.errors import UserError
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator, keyed_seed
from ddm_lightning.flow.timesteps import sample_timesteps, stratified_timesteps
from ddm_lightning.networks.attention import set_attention
from ddm_lightning.prepare.interfaces import CaptionEncoder
from ddm_lightning.prepare.stored import StoredForm
from ddm_lightning.training.ema import ema_weights, track_ema
from ddm_lightning.training.optimizer import build_optimizer, build_schedule
from ddm_lightning.training.strategy import compile_blocks, shard_blocks

NUM_VALIDATION_TIMESTEPS = 8


@dataclass(frozen=True)
class MemberSpec:
    """What one member's module needs to know besides its network."""

    member: str
    """Its name, which also keys its noise."""
    seed: int
    """The experiment's seed."""
    train: TrainConfig
    """Optimisation."""
    timesteps: TimestepsConfig
    """Training timesteps."""
    condition: ConditionSpec
    """What it is conditioned on."""
    dropout: float
    """Probability of dropping a sample's condition."""
    stored: StoredForm
    """How the shards hold ``x_0``."""
    caption_encoder: CaptionEncoder | None = None
    """What makes text vectors of what the shards store, where that is not the vectors themselves."""
    attention: str = "auto"
    """Attention back end on this island."""
    compile: bool = False
    """Whether blocks are compiled on this island."""


@dataclass(frozen=True)
class Noised:
    """A batch on the path between data and noise."""

    x_t: Float[Tensor, "b c h w"]
    t: Float[Tensor, " b"]
    noise: Float[Tensor, "b c h w"]
    x_0: Float[Tensor, "b c h w"]
    condition: Condition | None


class MemberModule(L.LightningModule):
    """Base of the experts' and the router's modules.

    All randomness of a step (timesteps, noise, dropped conditions, the network's own dropout) is keyed by
    (seed, member, global rank, step): ranks differ, and a resumed run repeats nothing and skips nothing.

    Args:
        network: the built network; sharding and compilation are applied to it in ``configure_model``.
        spec: the member.
    """

    def __init__(self, network: nn.Module, spec: MemberSpec) -> None:
        super().__init__()
        self.network = network
        self.spec = spec
        self._configured = False
        self._clipped: list[nn.Parameter] = []
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def configure_model(self) -> None:
        """Apply the island's choices to the network: attention, compiled blocks, shards."""
        if self._configured:
            return
        self._configured = True
        set_attention(self.network, self.spec.attention)
        if self.spec.compile:
            compile_blocks(self.network)
        if self._trainer is not None and isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh
            assert mesh is not None  # ModelParallelStrategy makes it
            shard_blocks(self.network, mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        """AdamW with EMA in its state, and the learning-rate schedule."""
        optimizer = build_optimizer(self.network, self.spec.train)
        track_ema(optimizer, self.spec.train.ema_decay)
        schedule = build_schedule(optimizer, self.spec.train)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """Clip by the global norm, also of sharded gradients, and average the norm for the log."""
        limit = self.spec.train.gradient_clip_norm
        if not self._clipped:
            self._clipped = list(self.network.parameters())  # a walk through all modules: once
        # An infinite limit measures without clipping.
        norm = nn.utils.clip_grad_norm_(self._clipped, float("inf") if limit is None else limit)
        self.accumulate("train/gradient_norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Key the global generator (a network's own dropout) by the step."""
        _seed(keyed_seed(*self._key("network")), self.device)

    def noised(self, batch: dict[str, Tensor]) -> Noised:
        """Draw this step's timesteps, noise and dropped conditions for a batch."""
        config, device = self.spec.timesteps, batch["x_0"].device
        generator = self._generator("noise", device)
        stored = batch["x_0"]
        if self.spec.train.horizontal_flip:
            flipped = torch.rand(len(stored), generator=generator, device=device) < 0.5
            # The encoding of the mirrored picture where the shards have it: a mirrored latent is not the same.
            mirrored = batch["x_0_flipped"] if "x_0_flipped" in batch else stored.flip(-1)
            stored = torch.where(flipped[:, None, None, None], mirrored, stored)
        x_0 = self.spec.stored.draw(stored, generator)
        t = sample_timesteps(
            len(x_0), config.density, config.mean, config.std, config.shift, generator=generator, device=device
        )
        noise = torch.randn(x_0.shape, generator=generator, device=device)
        condition = self.condition(batch)
        if condition is not None:
            condition = condition.dropped(torch.rand(len(x_0), generator=generator, device=device) < self.spec.dropout)
        return Noised(interpolate(x_0, noise, t), t, noise, x_0, condition)

    def validation_noised(self, batch: dict[str, Tensor], batch_idx: int, index: int) -> Noised:
        """The batch at the ``index``-th of 8 fixed timesteps, with noise that never changes."""
        x_0 = self.normalised(batch)
        t = stratified_timesteps(NUM_VALIDATION_TIMESTEPS)[index].to(x_0.device).expand(len(x_0))
        generator = keyed_generator(self.spec.seed, "validation", batch_idx, index, self.global_rank, device=x_0.device)
        noise = torch.randn(x_0.shape, generator=generator, device=x_0.device)
        return Noised(interpolate(x_0, noise, t), t, noise, x_0, self.condition(batch))

    def normalised(self, batch: dict[str, Tensor]) -> Float[Tensor, "b c h w"]:
        """``x_0`` of a batch, or its mean where a posterior is stored, in fp32 and the units that networks model."""
        return self.spec.stored.mean(batch["x_0"])

    def condition(self, batch: dict[str, Tensor]) -> Condition | None:
        """The condition of a batch, nothing dropped."""
        if self.spec.condition.kind == "none":
            return None
        if self.spec.condition.kind == "class":
            return Condition.of(batch["label"])
        if "text" not in batch and self.spec.caption_encoder is not None:
            return Condition.of(self.spec.caption_encoder.vectors_of_stored(batch))
        return Condition.of(batch["text"])

    def accumulate(self, name: str, value: Tensor, count: int = 1) -> None:
        """Add a sum of ``count`` values to a running average, without leaving the device."""
        value = value.detach().float()
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + count

    def drain(self, prefix: str) -> dict[str, float]:
        """The averages accumulated under ``prefix``, reset; the one place where the host waits for the device."""
        names = [name for name in self._sums if name.startswith(prefix)]
        averages = {name: float(self._sums.pop(name)) / self._counts.pop(name) for name in names}
        return dict(sorted(averages.items()))

    def check_finite(self) -> None:
        """Refuse to report, or to keep, what follows from a loss that is not finite.

        Raises:
            UserError: training diverged since the last report.
        """
        loss = self._sums.get("train/loss")
        if loss is not None and not bool(torch.isfinite(loss)):
            raise UserError(
                f"{self.spec.member}: the training loss is not finite by step {self.global_step}, training diverged; "
                f"lower its learning_rate and train into another folder with run_dir=…"
            )

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
        self.log_dict(self.drain("held_out/"), sync_dist=True, logger=False)

    def _generator(self, purpose: str, device: torch.device) -> torch.Generator:
        return keyed_generator(*self._key(purpose), device=device)

    def _key(self, purpose: str) -> tuple[int, str, str, int, int]:
        return self.spec.seed, self.spec.member, purpose, self.global_rank, self.global_step


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
