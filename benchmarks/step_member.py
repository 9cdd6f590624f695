"""A member's training step alone, on fixed random data."""

from __future__ import annotations

import torch
from step_networks import forget_compiled, random_batch
from torch import Tensor
from torch.nn import functional

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.cost import step_cost
from ddm_lightning.members.member import Member
from ddm_lightning.networks.attention import set_attention
from ddm_lightning.networks.blocks import checkpoint_blocks, compile_blocks
from ddm_lightning.shards.manifest import DataSizes
from ddm_lightning.training.ema import track_ema
from ddm_lightning.training.optimizer import build_optimizer, clip_in_step

PRECISIONS = ("32-true", "bf16-mixed")


class TrainingStep:
    """An expert's training step without loading and noise, on fixed random data.

    Runs forward and backward in the island's micro batches, then clipping, the optimizer and the averages.

    Args:
        member: name of the expert.
        experiment: its settings.
        sizes: sizes of its data.
        device: device to train on.

    Raises:
        UserError: a network that refuses its params, or a precision that needs more than autocast.
    """

    def __init__(self, member: str, experiment: Experiment, sizes: DataSizes, device: torch.device) -> None:
        island = experiment.island
        if island.precision not in PRECISIONS:
            raise UserError(
                f"key 'island.precision' = {island.precision!r}: steps are timed in {' and '.join(PRECISIONS)}; set one"
            )

        self.island = island
        self.device = device
        self.train = experiment.expert.train
        self.half = island.precision == "bf16-mixed"
        self.member = Member.resolve(member, experiment, sizes)
        with device:  # faster than on the host for billions of weights
            self.network = self.member.build_network()

        self.cost = step_cost(self.member, island, self.network)
        if island.activation_checkpointing:
            checkpoint_blocks(self.network)

        set_attention(self.network, island.attention)
        if island.compile:
            forget_compiled()
            compile_blocks(self.network)

        self.parameters = list(self.network.parameters())
        self.optimizer = build_optimizer(self.network, self.train)
        track_ema(self.optimizer, self.train.ema_decay, self.train.ema_widths)
        num = self.member.batch_size
        part = island.micro_batch_size or num
        self.parts = [slice(start, start + part) for start in range(0, num, part)]
        self.x_t, self.target, self.t = random_batch(num, sizes.x_shape, device)
        self.condition = _random_condition(self.member.condition, num, device)

    @property
    def num_parameters(self) -> int:
        """Parameters of the network."""
        return sum(parameter.numel() for parameter in self.parameters)

    def loss(self, rows: slice) -> Tensor:
        """Contribution of one micro batch to the mean loss of the batch."""
        condition = self.condition and self.condition.rows(rows)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            predicted = self.network(self.x_t[rows], self.t[rows], condition)
            return functional.mse_loss(predicted.float(), self.target[rows], reduction="sum") / self.target.numel()

    def take(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad()
        for rows in self.parts:
            self.loss(rows).backward()

        norm = clip_in_step(self.optimizer, self.parameters, self.train.gradient_clip_norm)
        # As the training's guard does; Muon then keeps a copy in case the step is skipped.
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # fused optimizers read it
        self.optimizer.step()


def _random_condition(spec: ConditionSpec, num: int, device: torch.device) -> Condition | None:
    if spec.kind == "none":
        return None

    generator = torch.Generator().manual_seed(1)
    if spec.kind == "class":
        values = torch.randint(spec.size, (num,), generator=generator)
    else:
        values = torch.randn(num, *spec.row_shape, generator=generator)

    return Condition.of(values.to(device))
