"""Measured floating-point operations of a network; a multiply-add counts as 2."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ddm_lightning.flow.condition import Condition, ConditionSpec


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
