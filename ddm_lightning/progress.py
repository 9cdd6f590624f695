"""What every progress bar says of time."""

from __future__ import annotations

from datetime import timedelta

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.text import Text


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
