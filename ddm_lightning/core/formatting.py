"""Format sizes and times for people, and columns of progress bars."""

from __future__ import annotations

from rich import filesize
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn


def amount(num_bytes: float) -> str:
    """Format bytes with a decimal unit, such as ``1.5 GB``."""
    return filesize.decimal(int(num_bytes))


def duration(seconds: float) -> str:
    """Format seconds with a unit from µs to days."""
    units = (("days", 86400.0, 2), ("h", 3600.0, 2), ("min", 60.0, 2), ("s", 1.0, 1), ("ms", 1e-3, 1))
    for unit, length, least in units:
        if seconds >= least * length:
            return f"{_digits(seconds / length)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    """Three significant digits; all digits of larger numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def time_column() -> ProgressColumn:
    """Column of the time left; total time at the end."""
    return TimeRemainingColumn(elapsed_when_finished=True)


def member_columns() -> tuple[ProgressColumn, ...]:
    """Columns of the training progress bars: name, bar, steps, time, newest metrics."""
    return (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        time_column(),
        TextColumn("{task.fields[note]}"),
    )
