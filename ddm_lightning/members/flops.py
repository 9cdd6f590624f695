"""Floating-point operations of a network, counted by evaluating it. A multiply-add counts as two."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.member import Member

_SMALL = 2e10
"""Most parameters times height and width of a network that is evaluated to count its FLOPs, in less than a second."""
_FORMULAS = {
    # The counter does not know attention as torch computes it on a CPU.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention
    ],
    **flop_registry,
}


def flops_per_sample(
    network: nn.Module, x_shape: tuple[int, int, int], condition: ConditionSpec, *, backward: bool
) -> float:
    """Floating-point operations of one sample's forward pass, or of its forward and backward pass.

    Counted by ``torch.utils.flop_counter`` on the meta device, without computing anything. The optimizer step
    (elementwise) is not counted.
    """
    num = 2  # a batch of one may take a shortcut
    meta = empty_copy(network, "meta").train(backward)
    inputs = example_inputs(x_shape, condition, num, "meta")
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        output = meta(*inputs)
        if backward:
            output.sum().backward()

    return counter.get_total_flops() / num


class _Counter:
    """FLOPs of the operations inside.

    The method is not in the mode's own class, because torch would import its compiler for it, which takes a second.
    """

    flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        out = function(*args, **given)
        formula = _FORMULAS.get(function.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **given, out_val=out)

        return out


class _CountingMode(_Counter, TorchDispatchMode):
    """See ``_Counter``."""


def forward_flops(network: nn.Module, x_shape: tuple[int, int, int], condition: ConditionSpec) -> float:
    """Floating-point operations of one sample's forward pass, of a network with its weights.

    A small one is evaluated on its own device. For the meta device torch would import its compiler, which takes longer.

    Args:
        network: expert or router; its weights are shared, not copied.
        x_shape: channels, height and width of a sample.
        condition: what the network takes beside ``x_t`` and ``t``.
    """
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    if num_parameters * math.prod(x_shape[1:]) > _SMALL:
        return flops_per_sample(network, x_shape, condition, backward=False)

    num = 2
    device = next(network.parameters(), torch.empty(0)).device
    uncompiled = copy.deepcopy(network, _shared(network)).eval()
    inputs = example_inputs(x_shape, condition, num, device)
    counting = _CountingMode()  # type: ignore[no-untyped-call]  # of torch
    # Torch has fused operators without a formula; it does not take them inside a mode of functions.
    with torch.inference_mode(False), torch.no_grad(), BaseTorchFunctionMode(), counting:
        uncompiled(*inputs)

    return counting.flops / num


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


def example_inputs(
    x_shape: tuple[int, int, int], condition: ConditionSpec, num: int, device: str | torch.device
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


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part)


def _shared(network: nn.Module) -> dict[int, Tensor]:
    """All tensors of a network by identity: a memo for a deep copy that shares them."""
    tensors = (value for module in network.modules() for value in tensors_in(vars(module)))
    return {id(value): value for value in tensors}


def empty_copy(network: nn.Module, device: str, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy with empty tensors on ``device``; ``dtype`` is that of its parameters, by default their own."""
    # Tensors that are neither, such as tables of positions, are shared: fake ones cannot be copied.
    memo = _shared(network)
    memo |= {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device=device, dtype=dtype), parameter.requires_grad)
        for parameter in network.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device=device) for buffer in network.buffers()}
    return copy.deepcopy(network, memo)
