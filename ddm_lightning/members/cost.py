"""What a member costs: operations of its training, and bytes of its state, activations and checkpoints."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddm_lightning.config.experiment import IslandConfig, TrainConfig
from ddm_lightning.core.devices import peak_of_this_device
from ddm_lightning.core.errors import first_line
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.members.flops import empty_copy, example_inputs, flops_by_shape, mean_flops, tensors_in
from ddm_lightning.members.member import Member
from ddm_lightning.networks.blocks import blocks_of, checkpoint_blocks, compile_blocks, is_muon_matrix, moment_block

HALF = ("bf16-mixed", "bf16-true")
"""Precisions under which sharded weights are gathered in two bytes; the range of float16 is too small for a copy."""
NUM_AT_ONCE = 1 << 20
"""Elements that ``CompactAdamW`` brings to float32 at once, unless one parameter has more."""
_COMPACT_STEP = 25
"""Bytes that it takes for each of them: weight, moments, random bits and codes."""


@dataclass(frozen=True)
class StepCost:
    """FLOPs of one training sample, and the peak of the devices."""

    flops: float
    """Forward and backward pass; recomputation does not count."""
    recomputed_flops: float
    """FLOPs that activation checkpointing adds."""
    peak_flops: float | None
    """FLOPs per second of all devices of the member; None if unknown, and then there is neither MFU nor HFU."""
    line: str = ""
    """FLOPs and peak in words, for the user."""


UNKNOWN_COST = StepCost(0.0, 0.0, None)


def step_cost(member: Member, island: IslandConfig, network: nn.Module) -> StepCost:
    """Count the FLOPs of a sample without computing anything, and look up the peak of the devices.

    Args:
        member: gives the sizes of its samples.
        island: its devices, precision and activation checkpointing.
        network: the member's.
    """
    try:
        forward = mean_flops(flops_by_shape(network, member, backward=False), member)
        whole = mean_flops(flops_by_shape(network, member, backward=True), member)
    except (RuntimeError, NotImplementedError) as error:  # operations of a plug-in that the counter does not know
        return StepCost(0.0, 0.0, None, f"its FLOPs cannot be counted ({first_line(error)}), so no MFU is shown")

    if island.activation_checkpointing:
        recomputed = forward
    else:
        recomputed = 0.0

    name, peak = peak_of_this_device(island.accelerator, island.precision)
    line = f"{whole / 1e9:.4g} GFLOP per sample"
    if peak is None:
        return StepCost(whole, recomputed, None, f"{line}; the peak of {name} is not known, so no MFU is shown")

    line += f"; MFU against {island.num_ranks} x {peak:g} TFLOP/s of {name} in {island.precision}"
    return StepCost(whole, recomputed, island.num_ranks * peak * 1e12, line)


def relative_cost(member: Member) -> int:
    """Parameters times training samples: roughly proportional to the FLOPs of the whole training."""
    num_parameters = sum(parameter.numel() for parameter in member.plan_network().parameters())
    return num_parameters * member.batch_size * member.train.max_steps


@dataclass(frozen=True)
class State:
    """Bytes that a training needs besides activations, unsharded."""

    weights: int
    gradients: int
    optimizer: int
    """Two moments of AdamW; one of Muon for its matrices."""
    ema: int
    """The exponential average, and power-function averages, on the device."""
    host: int = 0
    """These averages in the host's memory instead."""
    step: int = 0
    """What the optimizer's step makes and frees again."""

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer, "EMA": self.ema}
        line = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        if self.host:
            line += f"; EMA in the host's memory {format_bytes(self.host)}"

        return line

    @property
    def checkpoint(self) -> int:
        """What a checkpoint holds: everything but the gradients."""
        return self.weights + self.optimizer + self.ema + self.host

    @property
    def training(self) -> int:
        """Memory of the devices in a training without activations."""
        return self.weights + self.gradients + self.optimizer + self.ema


def state_of(network: nn.Module, train: TrainConfig, island: IslandConfig) -> State:
    """Bytes of the state in which a network's parameters are trained; its tensors may have no data.

    Args:
        network: the network.
        train: its optimizer and averages.
        island: its precision, and where it keeps averages.
    """
    eight_bits = train.optimizer == "adamw-8bit"
    half = island.precision == "bf16-true"
    num = optimizer = num_muon = largest = 0
    for name, parameter in network.named_parameters():
        size = parameter.numel()
        num += size
        largest = max(largest, size)
        block = moment_block(parameter) if eight_bits else None
        if block is not None:
            optimizer += 2 * (size + 4 * size // block)
        elif train.optimizer == "muon" and is_muon_matrix(name, parameter):
            num_muon += size
            optimizer += 4 * size
        else:
            optimizer += 8 * size

    step = 4 * num_muon  # a copy, in case that the step is skipped
    if eight_bits or half:
        step = _COMPACT_STEP * min(num, max(largest, NUM_AT_ONCE))

    weights = (2 if half else 4) * num
    averages = 4 * num * (1 + train.num_copies)
    if island.ema == "host":
        return State(weights, weights, optimizer, 0, averages, step)

    return State(weights, weights, optimizer, averages, 0, step)


def chosen_strategy(island: IslandConfig, state: State, num_bytes: int) -> str:
    """Resolve ``island.strategy``: ``auto`` is the one with the least communication that fits the devices.

    Args:
        island: its devices and settings.
        state: of the training.
        num_bytes: memory of one device.
    """
    if island.num_ranks == 1 and island.strategy in ("auto", "single"):
        return "single"
    if island.strategy != "auto":
        return island.strategy

    room = 0.5 * num_bytes  # the other half is left to activations
    if state.training < room:
        return "ddp"

    # Gathered weights come on top of the shards. A block's whole gradients do, too, but are far smaller.
    gathered = _gathered_bytes(state, island) + state.training / island.devices
    if gathered < room:
        return "fsdp-shard-grad-op"

    return "fsdp"


def _gathered_bytes(state: State, island: IslandConfig) -> int:
    if island.precision == "bf16-mixed":
        return state.weights // 2

    return state.weights


@dataclass(frozen=True)
class Memory:
    """Bytes of one device in a training step.

    Gradients come as the activations go, so that ``peak`` counts the larger of the two, unless both exist at once:
    with micro-batches, and with sharded gradients, which outlast the step's backward pass.
    """

    weights: int
    """The device's share, its buffers, and gathered weights under FSDP2."""
    gradients: int
    optimizer: int
    ema: int
    activations: int
    """Tensors that the forward pass of a micro-batch keeps for the backward pass, half-precision weights included."""
    temporary: int
    """Everything else that exists at the worst moment."""
    peak: int
    """The most at once."""
    host: int
    """Averages in the host's memory and the weights they take in, of all devices of a node."""


def micro_batch_of(member: Member, island: IslandConfig) -> tuple[int, int]:
    """Samples that a device computes at once, and how often it does so in a step."""
    num = math.ceil(member.batch_size / island.num_ranks)
    parts = math.ceil(num / (island.micro_batch_size or num))
    return math.ceil(num / parts), parts


class MemberCost:
    """Parameters, FLOPs and memory of one member, counted without computing anything.

    Args:
        member: the member; its network is built on the meta device.

    Raises:
        UserError: as ``Member.build_network``.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self.network = member.add_adapters(member.plan_network())
        self.num_parameters = sum(parameter.numel() for parameter in self.network.parameters())
        self._counted = cache(self._count)
        self._flops = cache(partial(flops_by_shape, self.network, member))

    def with_optimizer(self, optimizer: str) -> MemberCost:
        """The same member under another ``train.optimizer``; both share what is counted."""
        other = copy.copy(self)
        other.member = replace(self.member, train=replace(self.member.train, optimizer=optimizer))
        return other

    def state(self, island: IslandConfig) -> State:
        """State of the member's training on ``island``."""
        return state_of(self.network, self.member.train, island)

    def flops(self, *, backward: bool = True, member: Member | None = None) -> float:
        """Mean FLOPs of one sample, or of one of another ``member`` that differs in its samples alone.

        Raises:
            UserError: as ``flops_by_shape``.
        """
        return mean_flops(self._flops(backward=backward), member or self.member)

    def memory(self, island: IslandConfig, strategy: str) -> Memory:
        """Predict the memory of one device, in a step of the largest shape.

        A step with tensors that have no data counts what is alive. It takes a second, with compiled blocks some more:
        their graphs are those of torch's compiler before it makes kernels, so ``temporary`` is an upper bound.

        Args:
            island: devices and settings.
            strategy: from ``chosen_strategy``.

        Raises:
            RuntimeError: an operation of a plug-in needs data.
        """
        state = self.state(island)
        if strategy.startswith("fsdp"):
            num_shards = island.devices
        else:
            num_shards = 1

        is_sharded = num_shards > 1
        num, parts = micro_batch_of(self.member, island)
        activations, most = self._counted(
            num, parts > 1, is_sharded, island.precision, island.activation_checkpointing, island.compile
        )
        if is_sharded:
            gathered = _gathered_bytes(state, island)
        else:
            gathered = 0

        if strategy == "fsdp":  # two blocks at a time: one in use, one on its way
            gathered = min(gathered, 2 * gathered // max(1, len(blocks_of(self.network))))

        shares = {}
        for name in ("weights", "gradients", "optimizer", "ema"):
            shares[name] = getattr(state, name) // num_shards

        if is_sharded or parts > 1:
            kept = activations + shares["gradients"]
        else:
            kept = max(activations, shares["gradients"])

        most = max(most + shares["gradients"] * is_sharded, shares["gradients"] + state.step)
        shares["weights"] += gathered + sum(buffer.nbytes for buffer in self.network.buffers())
        peak = shares["weights"] + shares["optimizer"] + shares["ema"] + most
        host = 0
        if state.host:
            host = (state.host + state.weights) * island.devices // num_shards

        return Memory(**shares, activations=activations, temporary=most - kept, peak=peak, host=host)

    def _count(
        self, num: int, accumulates: bool, sharded: bool, precision: str, checkpointing: bool, compiled: bool
    ) -> tuple[int, int]:
        """Bytes kept by a forward pass, and the most bytes of a step besides state; without gradients if sharded."""
        half = precision == "bf16-true" or (sharded and precision in HALF)
        with FakeTensorMode(allow_non_fake_inputs=True):
            network = empty_copy(self.network, "cpu", torch.bfloat16 if half else None).train()
            if sharded:
                for parameter in network.parameters():
                    parameter.register_post_accumulate_grad_hook(_free_gradient)

            if checkpointing:
                checkpoint_blocks(network)

            inputs = example_inputs(self.member.largest_shape, self.member.condition, num, "cpu")

            def loss() -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                    output = network(*inputs)
                    return (output.float() - torch.zeros_like(output)).square().mean()

            if compiled:
                compile_blocks(network, "aot_eager_decomp_partition")
                loss().backward()
                network.zero_grad()

            kept = 0
            with _Held(tensors_in([*network.parameters(), *network.buffers(), *inputs])) as held:
                for _ in range(1 + accumulates):
                    before = held.now
                    value = loss()
                    kept = held.now - before
                    value.backward()
                    del value

        return kept, held.most


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Held(TorchDispatchMode):
    """Counts the bytes of tensors that are made within it and are alive.

    Args:
        known: tensors that exist before.
    """

    supports_higher_order_operators = True

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        storages = [tensor.untyped_storage() for tensor in known]
        self._alive: dict[int, object] = {id(storage): storage for storage in storages}

    @classmethod
    def is_infra_mode(cls) -> bool:
        """True: otherwise torch refuses to run compiled blocks."""
        return True

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            self._add(tensor.untyped_storage())

        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        num_bytes = storage.nbytes()
        if key in self._alive:
            return

        def free(_: object) -> None:
            del self._alive[key]
            self.now -= num_bytes

        self._alive[key] = weakref.ref(storage, free)
        self.now += num_bytes
        self.most = max(self.most, self.now)
