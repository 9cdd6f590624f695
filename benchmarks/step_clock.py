"""Seconds of turns that sides take one after the other, and ratios of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class Seconds(NamedTuple):
    """A duration."""

    wall: float
    cpu: float
    """Of this process: nearly blind to what else the machine does, and to a GPU."""


Clock = Callable[[], Seconds]


def now() -> Seconds:
    """Both clocks."""
    return Seconds(time.perf_counter(), time.process_time())


def since(start: Seconds, device: torch.device, clock: Clock = now) -> Seconds:
    """What has passed from ``start`` until all that was queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    end = clock()
    return Seconds(end.wall - start.wall, end.cpu - start.cpu)


def total(turns: Sequence[Seconds], num: int = 1) -> Seconds:
    """The sum of ``turns``, over ``num``."""
    return Seconds(sum(turn.wall for turn in turns) / num, sum(turn.cpu for turn in turns) / num)


def grouped(turns: Sequence[Seconds], turns_a_group: int, steps_a_group: int) -> list[Seconds]:
    """Seconds a step of each whole group of turns."""
    starts = range(0, len(turns) - turns_a_group + 1, turns_a_group)
    return [total(turns[start : start + turns_a_group], steps_a_group) for start in starts]


def ratio(ours: Sequence[Seconds], theirs: Sequence[Seconds], kind: str = "wall") -> float:
    """The median of the ratios of what was measured side by side."""
    return statistics.median(ratios(ours, theirs, kind))


def ratios(ours: Sequence[Seconds], theirs: Sequence[Seconds], kind: str = "wall") -> list[float]:
    """Ours over theirs, pair by pair."""
    return [getattr(a, kind) / getattr(b, kind) for a, b in zip(ours, theirs, strict=True)]


def median(turns: Sequence[Seconds], kind: str = "wall") -> float:
    """Seconds in the middle."""
    return statistics.median(getattr(turn, kind) for turn in turns)
