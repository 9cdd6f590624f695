"""Progress of ``prepare``: a silent reporter, and one with progress bars."""

from __future__ import annotations

import time
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from ddm_lightning.core.formatting import time_column

_SECONDS_BETWEEN_LINES = 60.0


@runtime_checkable
class Reporter(Protocol):
    """Receives the progress of ``prepare``."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Report ``done`` of ``total`` samples of a stage."""
        ...

    def say(self, line: str) -> None:
        """Report an event in one line."""
        ...


class SilentReporter:
    """Reports nothing."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Do nothing."""

    def say(self, line: str) -> None:
        """Do nothing."""


class RichReporter:
    """A bar per stage with elapsed and remaining time; a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), time_column())
        self._progress = Progress(*columns, console=console, transient=True)
        self._bars: dict[str, TaskID] = {}
        self._last_line = time.monotonic()

    def __enter__(self) -> RichReporter:
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Move the bar of ``stage``; create it at the first call."""
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._bars[stage], completed=done, total=total)
        # A log shows no bars: print a line a minute instead.
        if not self._progress.console.is_terminal and time.monotonic() > self._last_line + _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.say(f"{stage}: {done:,} of {total:,}")

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
