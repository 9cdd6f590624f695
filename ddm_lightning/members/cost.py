"""What a member costs: floating-point operations of its training, and bytes of its state, activations and checkpoints.

A multiply-add counts as two operations.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.devices import peak_of_this_device
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.members.member import Member
from ddm_lightning.networks.blocks import blocks_of, checkpoint_blocks, compile_blocks, is_muon_matrix

HALF = ("bf16-mixed",)
"""Precisions under which sharded weights are gathered in two bytes; the range of float16 is too small for a copy."""


def flops_per_sample(
    network: nn.Module, x_shape: tuple[int, int, int], condition: ConditionSpec, *, backward: bool
) -> float:
    """Floating-point operations of one sample's forward pass, or of its forward and backward pass.

    Counted by ``torch.utils.flop_counter`` on the meta device, without computing anything. The optimizer step
    (elementwise) is not counted.
    """
    num = 2  # a batch of one may take a shortcut
    meta = _empty_copy(network, "meta").train(backward)
    inputs = _example(x_shape, condition, num, "meta")
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        output = meta(*inputs)
        if backward:
            output.sum().backward()

    return counter.get_total_flops() / num


def flops_by_shape(network: nn.Module, member: Member, *, backward: bool) -> list[float]:
    """``flops_per_sample`` of each bucket, or of ``x_shape`` without buckets.

    Raises:
        UserError: the network takes no samples of a bucket's shape.
    """
    # First without buckets: a plug-in may need data.
    flops = flops_per_sample(network, member.x_shape, member.condition, backward=backward)
    if not member.buckets:
        return [flops]

    found = []
    for bucket in member.buckets:
        try:
            found.append(flops_per_sample(network, bucket.x_shape, member.condition, backward=backward))
        except Exception as error:
            raise UserError(
                f"{member.role.section} {member.network.name!r} takes no images of {bucket.name} pixels "
                f"({first_line(error)}); take another network, or change or remove prepare.images.buckets"
            ) from error

    return found


def mean_flops(flops: Sequence[float], member: Member) -> float:
    """Mean of ``flops_by_shape`` over a member's training samples."""
    shares = member.bucket_shares or (1.0,)
    return sum(share * one for share, one in zip(shares, flops, strict=True))


def _example(
    x_shape: tuple[int, int, int], condition: ConditionSpec, num: int, device: str
) -> tuple[Tensor, Tensor, Condition | None]:
    """``x_t``, ``t`` and condition of ``num`` samples."""
    rows = None
    if condition.kind != "none":
        values = torch.zeros(num, *condition.row_shape, device=device)
        if condition.kind == "class":
            values = values.long()

        vectors = None
        if condition.vector_size:
            vectors = torch.zeros(num, condition.vector_size, device=device)

        rows = Condition.of(values, vectors)

    return torch.zeros(num, *x_shape, device=device), torch.zeros(num, device=device), rows


def _tensors(value: object) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _empty_copy(network: nn.Module, device: str, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy with empty tensors on ``device``; ``dtype`` is that of its parameters, by default their own."""
    # Tensors that are neither, such as tables of positions, are shared: fake ones cannot be copied.
    plain = (value for module in network.modules() for value in _tensors(vars(module)))
    memo: dict[int, Tensor] = {id(value): value for value in plain}
    memo |= {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype), parameter.requires_grad)
        for parameter in network.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device=device) for buffer in network.buffers()}
    return copy.deepcopy(network, memo)


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
    """Bytes that a training needs besides activations, all fp32 and unsharded."""

    weights: int
    gradients: int
    optimizer: int
    """Two moments of AdamW; one of Muon for its matrices."""
    ema: int
    """The exponential average, and power-function averages."""

    @property
    def checkpoint(self) -> int:
        """What a checkpoint holds: everything but the gradients."""
        return self.weights + self.optimizer + self.ema

    @property
    def training(self) -> int:
        """Memory of a training without activations."""
        return self.checkpoint + self.gradients


def state_bytes(num_parameters: int, num_widths: int = 0, num_muon: int = 0) -> State:
    """Bytes of a training's state.

    Args:
        num_parameters: number of the network's parameters.
        num_widths: copies of the weights besides the exponential average (``TrainConfig.num_copies``).
        num_muon: number of parameters that Muon trains.
    """
    each = 4 * num_parameters
    return State(each, each, 2 * each - 4 * num_muon, (1 + num_widths) * each)


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
    if island.precision in HALF:
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
        named = dict(self.network.named_parameters())
        self.num_parameters = sum(parameter.numel() for parameter in named.values())
        self.num_muon = 0
        if member.train.optimizer == "muon":
            self.num_muon = sum(p.numel() for name, p in named.items() if is_muon_matrix(name, p))

        self.state = state_bytes(self.num_parameters, member.train.num_copies, self.num_muon)
        self._counted = cache(self._count)
        self._flops = cache(partial(flops_by_shape, self.network, member))

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
        state = self.state
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

        # Muon keeps its matrices in case that a step is skipped.
        most = max(most + shares["gradients"] * is_sharded, shares["gradients"] + 4 * self.num_muon)
        shares["weights"] += gathered + sum(buffer.nbytes for buffer in self.network.buffers())
        peak = shares["weights"] + shares["optimizer"] + shares["ema"] + most
        return Memory(**shares, activations=activations, temporary=most - kept, peak=peak)

    def _count(
        self, num: int, accumulates: bool, sharded: bool, precision: str, checkpointing: bool, compiled: bool
    ) -> tuple[int, int]:
        """Bytes kept by a forward pass, and the most bytes of a step besides state; without gradients if sharded."""
        half = sharded and precision in HALF
        with FakeTensorMode(allow_non_fake_inputs=True):
            network = _empty_copy(self.network, "cpu", torch.bfloat16 if half else None).train()
            if sharded:
                for parameter in network.parameters():
                    parameter.register_post_accumulate_grad_hook(_free_gradient)

            if checkpointing:
                checkpoint_blocks(network)

            inputs = _example(self.member.largest_shape, self.member.condition, num, "cpu")

            def loss() -> Tensor:
                with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
                    output = network(*inputs)
                    return (output.float() - torch.zeros_like(output)).square().mean()

            if compiled:
                compile_blocks(network, "aot_eager_decomp_partition")
                loss().backward()
                network.zero_grad()

            kept = 0
            with _Held(_tensors([*network.parameters(), *network.buffers(), *inputs])) as held:
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
        for tensor in _tensors(output):
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
