"""Memory of a training step, measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from step_networks import Timed
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


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

    return state + most_allocated(profiled)


def most_allocated(profiled: profile) -> int:
    """Most bytes of torch's CPU allocator at once, of those allocated while a profiler recorded its memory."""
    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)

    return most


def held(step: Timed) -> Iterator[Tensor]:
    """Yield tensors that outlast a step: weights, buffers and optimizer state."""
    yield from step.network.parameters()
    yield from step.network.buffers()
    for kept in step.optimizer.state.values():
        yield from (value for value in kept.values() if isinstance(value, Tensor))


def _bytes_of(tensors: Iterator[Tensor]) -> int:
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())
