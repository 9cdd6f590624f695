"""How far ``prepare`` is: a silent reporter, and one that draws bars with the time left."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
)

from ddm_lightning.core.formatting import TimeColumn

_SECONDS_BETWEEN_LINES = 60.0


@runtime_checkable
class Reporter(Protocol):
    """What ``prepare`` tells while it works."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """``done`` of ``total`` samples of a stage are ready."""
        ...

    def say(self, line: str) -> None:
        """Something worth one line happened."""
        ...


class SilentReporter:
    """Tells nothing."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Nothing."""

    def say(self, line: str) -> None:
        """Nothing."""


class RichReporter:
    """A bar with elapsed and remaining time per stage; a context manager that ends the bars."""

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeColumn(),
            console=console,
            transient=True,
        )
        self._bars: dict[str, TaskID] = {}
        self._told = time.monotonic()

    def __enter__(self) -> RichReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Move the bar of ``stage``, drawn when it is first heard of."""
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._bars[stage], completed=done, total=total)
        # A log shows no bars: a line a minute instead.
        if not self._progress.console.is_terminal and time.monotonic() > self._told + _SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            self.say(f"{stage}: {done:,} of {total:,}")

    def say(self, line: str) -> None:
        """Print above the bars, as it is."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
