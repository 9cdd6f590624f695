"""What a member costs: floating-point operations of its training, and bytes of its state, activations and checkpoints.

A multiply-add counts as two operations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.devices import peak_of_this_device
from ddm_lightning.core.errors import first_line
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.members.member import Member


def flops_per_sample(
    network: nn.Module, x_shape: tuple[int, int, int], condition: ConditionSpec, *, backward: bool
) -> float:
    """Floating-point operations of one sample's forward pass, or of its forward and backward pass.

    Counted by ``torch.utils.flop_counter`` on the meta device, without computing anything. The optimizer step
    (elementwise) is not counted.
    """
    num = 2  # a batch of one may take a shortcut
    meta = _on_meta(network).train(backward)
    x_t = torch.zeros(num, *x_shape, device="meta")
    t = torch.zeros(num, device="meta")
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        output = meta(x_t, t, _example_condition(condition, num))
        if backward:
            output.sum().backward()
    return counter.get_total_flops() / num


def _example_condition(condition: ConditionSpec, num: int) -> Condition | None:
    if condition.kind == "none":
        return None
    dtype = torch.int64 if condition.kind == "class" else torch.float32
    return Condition.of(torch.zeros(num, *condition.row_shape, dtype=dtype, device="meta"))


def _on_meta(network: nn.Module) -> nn.Module:
    """A copy without data, which takes no memory."""
    memo: dict[int, torch.Tensor] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in network.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in network.buffers()}
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
        forward = flops_per_sample(network, member.x_shape, member.condition, backward=False)
        whole = flops_per_sample(network, member.x_shape, member.condition, backward=True)
    except (RuntimeError, NotImplementedError) as error:  # operations of a plug-in that the counter does not know
        return StepCost(0.0, 0.0, None, f"its FLOPs cannot be counted ({first_line(error)}), so no MFU is shown")
    recomputed = forward if island.activation_checkpointing else 0.0
    name, peak = peak_of_this_device(island.accelerator, island.precision)
    line = f"{whole / 1e9:.4g} GFLOP per sample"
    if peak is None:
        return StepCost(whole, recomputed, None, f"{line}; the peak of {name} is not known, so no MFU is shown")
    line += f"; MFU against {island.devices} x {peak:g} TFLOP/s of {name} in {island.precision}"
    return StepCost(whole, recomputed, island.devices * peak * 1e12, line)


def relative_cost(member: Member) -> int:
    """Parameters times training samples: roughly proportional to the FLOPs of the whole training."""
    num_parameters = sum(parameter.numel() for parameter in member.plan_network().parameters())
    return num_parameters * member.batch_size * member.train.max_steps


def checkpoint_bytes(num_parameters: int, num_widths: int = 0) -> int:
    """Bytes of weights, two AdamW moments, the EMA and ``num_widths`` power-function averages, all fp32."""
    return 4 * (4 + num_widths) * num_parameters


def training_bytes(num_parameters: int, num_widths: int = 0) -> int:
    """Unsharded memory of a training besides activations: the checkpoint's contents and the gradients."""
    return checkpoint_bytes(num_parameters, num_widths + 1)


def step_bytes(network: nn.Module, loss: Callable[[], Tensor], state: int, *, accumulates: bool) -> int:
    """Predict the peak memory of a training step from forward passes of the first two blocks.

    Weights and optimizer state exist all the time. When the backward pass begins, the tensors kept by the forward pass
    exist as well; when it ends, all gradients and the tensors kept by the first block. Activation checkpointing adds
    the recomputed tensors of one block. Temporary tensors are not counted.

    Args:
        network: on its device, with equal ``blocks``.
        loss: computes the loss of one micro-batch.
        state: bytes that outlast a step: weights, buffers and optimizer state.
        accumulates: whether a step has several micro-batches, and gradients exist from the first on.
    """
    blocks = network.blocks
    assert isinstance(blocks, nn.ModuleList)
    one, two = (_kept_by_first(network, loss, blocks, num) for num in (1, 2))
    kept = one + (len(blocks) - 1) * (two - one)
    anew = 0
    if "forward" in vars(blocks[0]):
        with _as_written(blocks[0]):
            anew = _kept_by_first(network, loss, blocks, 1) - one
    gradients = sum(parameter.nbytes for parameter in network.parameters())
    return state + anew + max(kept + gradients * accumulates, gradients + one)


def activation_bytes(network: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward pass, without uncast weights."""
    own = {tensor.untyped_storage().data_ptr() for tensor in network.state_dict(keep_vars=True).values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()  # by address: a view of a kept tensor costs nothing
        return tensor.detach()  # the tensor itself and its graph would keep each other alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = loss()
    del value  # only now: its graph keeps the counted tensors, so that no address is reused
    return sum(kept.values())


def _kept_by_first(network: nn.Module, loss: Callable[[], Tensor], blocks: nn.ModuleList, num: int) -> int:
    network.blocks = nn.ModuleList(list(blocks)[:num])
    try:
        return activation_bytes(network, loss)
    finally:
        network.blocks = blocks


@contextmanager
def _as_written(block: nn.Module) -> Iterator[None]:
    """Run ``block`` neither compiled nor checkpointed, by removing the attributes that hide its class's methods."""
    names = [name for name in ("forward", "_compiled_call_impl") if name in vars(block)]
    hidden: dict[str, object] = {name: vars(block).pop(name) for name in names}
    try:
        yield
    finally:
        vars(block).update(hidden)
