"""Memory of a training step: planned before it is taken, and measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from step_networks import Timed
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


def planned_bytes(step: Timed) -> int:
    """What ``step`` will hold at its peak, of which no part was taken: only the first two blocks run forward.

    Weights and what the optimizer keeps are there all the time; what the forward pass keeps for the backward pass is
    held when that begins, and all gradients when it ends, beside what the first block kept. Under activation
    checkpointing one block's own is made anew meanwhile. Temporaries are left out.

    Args:
        step: on its device; ``network.blocks`` are alike, and the optimizer has taken a step.
    """
    blocks = step.network.blocks
    assert isinstance(blocks, nn.ModuleList)
    one, two = (_kept_by_first(step, blocks, num) for num in (1, 2))
    kept = one + (len(blocks) - 1) * (two - one)
    anew = 0
    if "forward" in vars(blocks[0]):
        with _as_written(blocks[0]):
            anew = _kept_by_first(step, blocks, 1) - one
    gradients = sum(_size(parameter) for parameter in step.network.parameters())
    state = _bytes_of(held(step))
    return state + anew + max(kept + gradients * (step.num_parts > 1), gradients + one)


def peak_bytes(step: Timed) -> int:
    """The most that is held while ``step`` is taken once, of what is the step's."""
    step.optimizer.zero_grad()
    state = _bytes_of(held(step))
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)
        before = torch.cuda.memory_allocated(step.device)
        torch.cuda.reset_peak_memory_stats(step.device)
        step.seconds(1)
        return state + torch.cuda.max_memory_allocated(step.device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.take()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return state + most


def held(step: Timed) -> Iterator[Tensor]:
    """What outlasts a step: weights, buffers, and what the optimizer keeps of each weight."""
    yield from step.network.parameters()
    yield from step.network.buffers()
    for kept in step.optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, Tensor))


def kept_for_backward(step: Timed) -> int:
    """Bytes that a forward pass keeps until the backward pass, weights in their own type left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in step.network.state_dict(keep_vars=True).values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()  # by address: a part of what is kept already costs nothing
        return tensor.detach()  # the tensor itself would hold its graph, and the graph the tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step.loss()
    del loss  # not before: its graph holds what was counted, so that no address was given out twice
    return sum(kept.values())


def _kept_by_first(step: Timed, blocks: nn.ModuleList, num: int) -> int:
    step.network.blocks = nn.ModuleList(list(blocks)[:num])
    try:
        return kept_for_backward(step)
    finally:
        step.network.blocks = blocks


@contextmanager
def _as_written(block: nn.Module) -> Iterator[None]:
    """Neither compiled nor computed twice: what was set on it hides what its class has."""
    hidden: dict[str, object] = {
        name: vars(block).pop(name) for name in ("forward", "_compiled_call_impl") if name in vars(block)
    }
    try:
        yield
    finally:
        vars(block).update(hidden)


def _bytes_of(tensors: Iterator[Tensor]) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
