"""Memory of a training step: predicted without running it, and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from step_networks import Timed
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


def planned_bytes(step: Timed) -> int:
    """Predict the peak memory of ``step`` from forward passes of its first two blocks; its optimizer has taken a step.

    Weights and optimizer state exist all the time. When the backward pass begins, the tensors kept by the forward pass
    exist as well; when it ends, all gradients and the tensors kept by the first block. Activation checkpointing adds
    the recomputed tensors of one block. Temporary tensors are not counted. With several micro-batches, gradients exist
    from the first on. The network's ``blocks`` must be equal.
    """
    blocks = step.network.blocks
    assert isinstance(blocks, nn.ModuleList)
    one, two = (_kept_by_first(step, blocks, num) for num in (1, 2))
    kept = one + (len(blocks) - 1) * (two - one)
    anew = 0
    if "forward" in vars(blocks[0]):
        with _as_written(blocks[0]):
            anew = _kept_by_first(step, blocks, 1) - one
    gradients = sum(parameter.nbytes for parameter in step.network.parameters())
    return _bytes_of(held(step)) + anew + max(kept + gradients * (step.num_parts > 1), gradients + one)


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


def _kept_by_first(step: Timed, blocks: nn.ModuleList, num: int) -> int:
    step.network.blocks = nn.ModuleList(list(blocks)[:num])
    try:
        return activation_bytes(step.network, step.loss)
    finally:
        step.network.blocks = blocks


@contextmanager
def _as_written(block: nn.Module) -> Iterator[None]:
    """Run ``block`` neither compiled nor checkpointed, by removing the attributes that hide its class's methods."""
    names = [name for name in ("forward", "_compiled_call_impl") if name in vars(block)]
    hidden: dict[str, object] = {name: vars(block).pop(name) for name in names}
    try:
        yield
    finally:
        vars(block).update(hidden)


def peak_bytes(step: Timed) -> int:
    """Measure the peak memory of the step's own tensors while ``step`` is taken once."""
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
    """Yield tensors that outlast a step: weights, buffers and optimizer state."""
    yield from step.network.parameters()
    yield from step.network.buffers()
    for kept in step.optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, Tensor))


def _bytes_of(tensors: Iterator[Tensor]) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
