"""Memory of a member's training steps, measured."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.devices import device_of
from ddm_lightning.members.member import Member
from ddm_lightning.training.measure import samples_per_second


def peak_bytes(member: Member, island: IslandConfig) -> int:
    """Most bytes that torch holds at once in some steps of a training: weights, state, averages, a batch and all else.

    Args:
        member: trained on random data, without checkpoints.
        island: its settings, for one device.
    """
    gc.collect()  # tensors of earlier trainings
    torch.compiler.reset()
    train = partial(samples_per_second, member, island)
    if device_of(island.accelerator).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train()
        return torch.cuda.max_memory_allocated()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        train()

    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    now = most = 0
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)

    return most
