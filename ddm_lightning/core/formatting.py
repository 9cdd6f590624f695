"""Format sizes, times and tables for people; progress bars, or lines where there is no terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rich import box, filesize
from rich.console import Console
from rich.jupyter import JupyterMixin
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

LINE_SECONDS = 30.0
"""Interval of the lines that are printed instead of bars when there is no terminal."""
_NOTEBOOK_SECONDS = 0.5


def format_bytes(num_bytes: float) -> str:
    """Format bytes with a decimal unit, such as ``1.5 GB``."""
    return filesize.decimal(int(num_bytes))


def format_duration(seconds: float) -> str:
    """Format seconds with a unit from µs to days."""
    units = (("days", 86400.0, 2), ("h", 3600.0, 2), ("min", 60.0, 2), ("s", 1.0, 1), ("ms", 1e-3, 1), ("µs", 1e-6, 0))
    unit, length = next((unit, length) for unit, length, least in units if seconds >= least * length)
    return f"{format_number(seconds / length)} {unit}"


def format_number(value: float) -> str:
    """Format a number with three significant digits, or all digits of a larger one: ``0.0512``, ``51.2``, ``5,120``."""
    if value >= 100:
        return f"{value:,.0f}"

    return f"{value:.3g}"


def table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", texts: Collection[str] = ("",)
) -> Table:
    """Tabulate cells, which may be a stranger's: columns of ``texts`` to the left and wrapped, figures to the right."""
    found = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        is_text = heading in texts
        found.add_column(heading, justify="left" if is_text else "right", no_wrap=not is_text)

    for row in rows:
        found.add_row(*map(Text, row))

    return found


class Shown(JupyterMixin):
    """Base of what ``print``, rich and notebooks show as rich renders it."""

    def __repr__(self) -> str:
        console = Console(force_jupyter=False)
        with console.capture() as text:
            console.print(self)

        return text.get()


class Bars(Progress):
    """Progress bars on a terminal or in a notebook; elsewhere a line about the running tasks, if it is new.

    Args:
        console: by default stderr.
        show: whether to show anything at all.
        transient: whether bars disappear at the end, on a terminal.
    """

    def __init__(self, console: Console | None = None, *, show: bool = True, transient: bool = False) -> None:
        console = console or Console(stderr=True)
        # Colours that a variable forces into a file do not make it a screen.
        is_screen = console.is_interactive and console.file.isatty()
        self._shows_lines = show and not is_screen
        self._over = threading.Event()
        show_lines = self._draw_in_notebook if console.is_jupyter else self._print_lines
        self._lines = threading.Thread(target=show_lines, name="progress", daemon=True)
        super().__init__(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not (show and is_screen),
            transient=transient,
        )

    def start(self) -> None:
        """Show the bars, or begin to print lines."""
        super().start()
        if self._shows_lines:
            if self.console.is_jupyter:
                from IPython.display import display

                self._drawing = display(self, display_id=True)  # type: ignore[no-untyped-call]

            self._lines.start()

    def stop(self) -> None:
        """End the bars or the lines."""
        super().stop()
        self._over.set()
        if self._lines.is_alive():
            self._lines.join()

    def add_task(self, description: str, *options: Any, **fields: Any) -> TaskID:
        """Add a task; its field ``note`` is empty by default."""
        return super().add_task(description, *options, **{"note": "", **fields})

    def from_here(self, task: TaskID) -> Callable[[float], None]:
        """Return a function to call with what has been completed of a task since this call."""
        before = self.tasks[task].completed
        return lambda done: self.update(task, completed=before + done)

    def _print_lines(self) -> None:
        last = ""
        over = False
        while not over:
            over = self._over.wait(LINE_SECONDS)
            if over and not last:
                return  # too quick for lines

            started = [task for task in self.tasks if task.started]
            running = [task for task in started if not task.finished] or started[-1:]
            line = "; ".join(map(_line_of, running)) or "starting"
            if line != last:
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)

            last = line

    def _draw_in_notebook(self) -> None:
        """Redraw the bars in the output of their cell, for which rich alone would need ipywidgets."""
        over = False
        while not over:
            over = self._over.wait(_NOTEBOOK_SECONDS)
            self._drawing.update(self)


def _line_of(task: Task) -> str:
    line = f"{task.description}: {task.completed:,.0f} of {task.total or 0:,.0f}"
    if task.time_remaining:
        line += f", {format_duration(task.time_remaining)} left"
    if task.fields["note"]:
        line += f", {task.fields['note']}"

    return line
