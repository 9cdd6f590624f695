"""Our training loop and a bare one around the same network; they alternate and end with the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning as L
import torch
from common import MEMBER
from step_clock import Seconds, now, since, timed
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.config.experiment import Experiment, TrainConfig
from ddm_lightning.core.devices import autocast, device_of
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.timesteps import sample_timesteps
from ddm_lightning.members.cost import state_of
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.training.callbacks import RollingCheckpoints
from ddm_lightning.training.checkpoint import origin_of
from ddm_lightning.training.fit import build_data, build_trainer
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import build_objective
from ddm_lightning.training.optimizer import build_optimizer, build_schedule
from ddm_lightning.training.parallel import apply_island, choose_strategy

Batch = dict[str, Tensor]


class BareLoop:
    """Training loop without a Trainer: only the next batch and the step itself.

    Args:
        run: run of ``MEMBER``.
        batches: batches of its steps, in order.
        device: training device.
    """

    def __init__(self, run: Run, batches: Iterator[Batch], device: torch.device) -> None:
        member = run.member(MEMBER)
        experiment = run.experiment
        manifest = run.manifest
        self.train: TrainConfig = member.train
        self.timesteps = member.timesteps
        self.seed = experiment.seed
        self.dropout = experiment.condition.dropout
        self.precision = experiment.island.precision
        self.device = device
        self.batches = batches
        self.stored = StoredForm(manifest.stores, manifest.normalisation)
        self.network = member.build_network().to(device)
        apply_island(self.network, experiment.island)
        self.optimizer = build_optimizer(self.network, self.train)
        self.schedule = build_schedule(self.optimizer, self.train)
        self.parameters: list[Tensor] = list(self.network.parameters())
        self.averages: list[Tensor] = []
        self.step = 0

    def take(self, num_steps: int) -> None:
        """Take the next ``num_steps`` steps."""
        for _ in range(num_steps):
            batch = next(self.batches)
            generator = keyed_generator(self.seed, MEMBER, "noise", 0, self.step, device=self.device)
            x_0 = self.stored.mean(batch["x_0"].to(self.device, non_blocking=True))
            config = self.timesteps
            num = len(x_0)
            t = sample_timesteps(
                num, config.density, config.mean, config.std, config.shift, generator=generator, device=self.device
            )
            noise = torch.randn(x_0.shape, generator=generator, device=self.device)
            texts = batch["text"].to(self.device, non_blocking=True)
            dropped = torch.rand(num, generator=generator, device=self.device) < self.dropout
            with autocast(self.precision, self.device):
                predicted = self.network(interpolate(x_0, noise, t), t, Condition(texts, ~dropped))
                loss = functional.mse_loss(predicted.float(), noise - x_0)

            self.optimizer.zero_grad()
            loss.backward()
            self._clip()
            self.optimizer.step()
            self._average()
            self.schedule.step()
            self.step += 1

    def _clip(self) -> None:
        """Clip within the fused step, as ours: ``clip_grad_norm_`` rounds otherwise and takes another pass."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        limit = self.train.gradient_clip_norm or float("inf")
        scale = ((norm + 1e-6) / limit).clamp(min=1)
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]  # fused optimizers read it

    @torch.no_grad()
    def _average(self) -> None:
        decay = min(self.train.ema_decay, (1 + self.step) / (10 + self.step))
        if not self.averages:
            self.averages = [parameter.detach().clone() for parameter in self.parameters]

        torch._foreach_lerp_(self.averages, self.parameters, 1.0 - decay)


class TakeTurns(L.Callback):
    """Stops the Trainer's clock after every ``steps`` steps while the bare loop takes equally many.

    A turn of the Trainer lasts from the end of a step to the end of a later one, so it includes all work between steps.
    """

    def __init__(self, loop: BareLoop, steps: int) -> None:
        self.loop = loop
        self.steps = steps
        self.ours: list[Seconds] = []
        """Time of each turn of the Trainer."""
        self.bare: list[Seconds] = []
        """Time of each turn of the bare loop."""
        self._start = now()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Let the bare loop take its turn when it is due."""
        if trainer.global_step % self.steps == 0:
            self.ours.append(since(self._start, self.loop.device))
            self.bare.append(timed(partial(self.loop.take, self.steps), self.loop.device))
            self._start = now()


@dataclass(frozen=True)
class Trained:
    """Times and final weights of both loops."""

    ours: list[Seconds]
    """Time of each turn of the Trainer."""
    bare: list[Seconds]
    """Time of each turn of the bare loop."""
    same: bool
    """Whether both end with the same weights and averages, bit for bit."""


def our_trainer(experiment: Experiment) -> tuple[L.Trainer, MemberModule, ClusterDataModule]:
    """Build what ``fit`` trains ``MEMBER`` of a prepared run with, from scratch."""
    run = Run(experiment)
    member = run.member(MEMBER)
    run.folder.member(MEMBER).mkdir(parents=True, exist_ok=True)
    module = MemberModule(build_objective(member, run), experiment.island)
    strategy, _ = choose_strategy(experiment.island, state_of(module.network, member.train, experiment.island))
    status = MemberStatus(MEMBER, member.train.max_steps)
    trainer, _ = build_trainer(member, run, status, strategy, origin_of(member, experiment))
    return trainer, module, build_data(member, run)


def train(experiment: Experiment, steps: int) -> Trained:
    """Train ``MEMBER`` of a prepared run as ``fit`` does and with the bare loop, alternating every ``steps`` steps."""
    run = Run(experiment)
    trainer, module, data_of_ours = our_trainer(experiment)
    data = build_data(module.member, run)
    data.prepare_data()
    batches = itertools.chain.from_iterable(itertools.repeat(data.train_dataloader()))
    loop = BareLoop(run, batches, device_of(experiment.island.accelerator))
    turns = TakeTurns(loop, steps)
    # Just before the callback that saves after the last step, so that saving is not part of the last turn.
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning's list
    kinds = [type(callback) for callback in callbacks]
    callbacks.insert(kinds.index(RollingCheckpoints), turns)
    trainer.fit(module, datamodule=data_of_ours)
    state = trainer.optimizers[0].state
    ours: list[Tensor] = list(module.network.parameters())
    ours += [state[parameter]["ema"] for parameter in ours]
    bare = [*loop.parameters, *loop.averages]
    # The Trainer moves its network back to the host.
    same = all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(ours, bare, strict=True))
    return Trained(turns.ours, turns.bare, same)
