"""Times of alternating turns, and their ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, truediv
from typing import NamedTuple

import numpy as np
import torch
from common import Report

HEADINGS = ["", "ours, ms per step", "other, ms per step", "ratio", "lowest", "highest", "ratio of CPU times"]


class Seconds(NamedTuple):
    """A duration."""

    wall: float
    cpu: float
    """CPU time of the process measured: hardly affected by other processes, and without the GPU's work."""


def now() -> Seconds:
    """Read both clocks."""
    return Seconds(time.perf_counter(), time.process_time())


def since(start: Seconds, device: torch.device) -> Seconds:
    """Time from ``start`` until all work queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

    end = now()
    return Seconds(end.wall - start.wall, end.cpu - start.cpu)


def timed(take: Callable[[], object], device: torch.device, num_calls: int = 1) -> Seconds:
    """Mean time of a call."""
    start = now()
    for _ in range(num_calls):
        take()

    passed = since(start, device)
    return Seconds(passed.wall / num_calls, passed.cpu / num_calls)


def in_turn(
    ways: Mapping[str, Callable[[], object]], device: torch.device, num_rounds: int, num_calls: int = 1
) -> dict[str, list[Seconds]]:
    """Measure seconds per call of each way, one value per round; every other round runs in reverse order.

    Two turns of each way warm up first.
    """
    for way in ways.values():
        timed(way, device, 2 * num_calls)

    found: dict[str, list[Seconds]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(num_rounds):
        for name in order:
            found[name].append(timed(ways[name], device, num_calls))

        order.reverse()

    return found


def grouped(turns: Sequence[Seconds], turns_per_group: int, steps_per_group: int) -> list[Seconds]:
    """Seconds per step of each group of turns."""
    sums = np.reshape(turns, (-1, turns_per_group, 2)).sum(1) / steps_per_group
    return [Seconds(*group) for group in sums.tolist()]


def ratio(ours: Sequence[Seconds], theirs: Sequence[Seconds], kind: str = "wall") -> float:
    """Median of the pairwise ratios."""
    return statistics.median(ratios(ours, theirs, kind))


def ratios(ours: Sequence[Seconds], theirs: Sequence[Seconds], kind: str = "wall") -> list[float]:
    """Our times over theirs, pair by pair."""
    clock = attrgetter(kind)
    return list(map(truediv, map(clock, ours), map(clock, theirs)))


def add_ratio(report: Report, name: str, title: str, ours: Sequence[Seconds], others: Sequence[Seconds]) -> None:
    """Add a row, and the figures ``name`` and ``name_cpu_seconds``."""
    each = ratios(ours, others)
    value = statistics.median(each)
    cpu = ratio(ours, others, "cpu")
    report.figures |= {name: value, f"{name}_cpu_seconds": cpu}
    times = [1000 * median(ours), 1000 * median(others)]
    figures = [*times, value, min(each), max(each), cpu]
    report.row(title, *map("{:.3f}".format, figures))


def median(turns: Sequence[Seconds], kind: str = "wall") -> float:
    """Median seconds of a turn."""
    return statistics.median(map(attrgetter(kind), turns))
