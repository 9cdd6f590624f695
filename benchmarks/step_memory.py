"""Memory of a training step, measured."""

from __future__ import annotations

from typing import Any

import torch
from step_clock import timed
from step_member import TrainingStep
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


def peak_bytes(step: TrainingStep) -> int:
    """Measure the peak memory of the step's own tensors while ``step`` is taken once."""
    step.optimizer.zero_grad()
    state = bytes_held(step)
    if step.device.type == "cuda":
        torch.cuda.synchronize(step.device)
        before = torch.cuda.memory_allocated(step.device)
        torch.cuda.reset_peak_memory_stats(step.device)
        timed(step.take, step.device)
        return state + torch.cuda.max_memory_allocated(step.device) - before

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.take()

    return state + most_allocated(profiled)


def most_allocated(profiled: profile) -> int:
    """Most bytes of torch's CPU allocator at once, of those allocated while a profiler recorded its memory."""
    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    now = most = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)

    return most


def bytes_held(step: TrainingStep) -> int:
    """Bytes of tensors that outlast a step: weights, buffers and optimizer state."""
    tensors = [*step.network.parameters(), *step.network.buffers()]
    for kept in step.optimizer.state.values():
        tensors += [value for value in kept.values() if isinstance(value, Tensor)]

    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()

    return sum(storages.values())
