"""Times of alternating turns, and their ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


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


def grouped(turns: Sequence[Seconds], turns_per_group: int, steps_per_group: int) -> list[Seconds]:
    """Seconds per step of each group of turns."""
    sums = np.reshape(turns, (-1, turns_per_group, 2)).sum(1) / steps_per_group
    return [Seconds(*group) for group in sums.tolist()]


def ratio(ours: Sequence[Seconds], theirs: Sequence[Seconds], kind: str = "wall") -> float:
    """Median of the pairwise ratios."""
    return statistics.median(ratios(ours, theirs, kind))


def ratios(ours: Sequence[Seconds], theirs: Sequence[Seconds], kind: str = "wall") -> list[float]:
    """Our times over theirs, pair by pair."""
    return [getattr(a, kind) / getattr(b, kind) for a, b in zip(ours, theirs, strict=True)]


def median(turns: Sequence[Seconds], kind: str = "wall") -> float:
    """Median seconds of a turn."""
    return statistics.median(getattr(turn, kind) for turn in turns)
