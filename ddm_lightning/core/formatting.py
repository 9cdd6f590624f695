"""Sizes and times as people read them."""

from __future__ import annotations

from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.text import Text


def amount(num_bytes: float) -> str:
    """Bytes in the unit that fits, powers of 1000."""
    return _scaled(num_bytes, "B")


def operations(flops: float) -> str:
    """Floating-point operations in the unit that fits."""
    return _scaled(flops, "FLOP")


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    units = (("days", 86400.0, 2), ("h", 3600.0, 2), ("min", 60.0, 2), ("s", 1.0, 1), ("ms", 1e-3, 1))
    for unit, length, least in units:
        if seconds >= least * length:
            return f"{_digits(seconds / length)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _scaled(value: float, unit: str) -> str:
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while round(value, 1) >= 1000 and power < len(prefixes) - 1:
        value /= 1000
        power += 1
    return f"{_digits(value)} {prefixes[power]}{unit}"


class TimeColumn(ProgressColumn):
    """The time left; before there is an estimate the time so far, and at the end the time that it took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """One of the three."""
        if task.finished:
            return Text(f"took {_clock(task.finished_time)}", "progress.elapsed")
        if task.time_remaining is None:
            return Text(f"{_clock(task.elapsed)} so far", "progress.elapsed")
        return Text(f"{_clock(task.time_remaining)} left", "progress.remaining")


def _clock(seconds: float | None) -> str:
    return str(timedelta(seconds=int(seconds or 0)))


def member_columns() -> tuple[ProgressColumn, ...]:
    """The columns of every training progress bar: name, bar, steps, time, newest figures."""
    return (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeColumn(),
        TextColumn("{task.fields[note]}"),
    )
