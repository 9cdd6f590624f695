"""Shared by all benchmarks: command line, results file, tables, and calls of ``ddm_lightning``."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.compat import defer_heavy_packages, ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json, atomic_write_text
from ddm_lightning.core.formatting import time_column

ensure_torchvision_importable()  # before a benchmark imports Streaming
defer_heavy_packages()

REPOSITORY = Path(__file__).resolve().parents[1]
LOGS_SAMPLES = "island.callbacks=[{name: sample-log}]"
"""Setting that writes each step's sample ids to the member's folder, by a plug-in of ``tests``."""
PYTHON_PATH = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")])
"""PYTHONPATH of child processes that need this plug-in."""
INTERRUPTED = 130


def parser(description: str, *, config: str | None = None) -> argparse.ArgumentParser:
    """Make a parser with the options common to all benchmarks; ``config`` is the default of ``-c``."""
    cli = argparse.ArgumentParser(description=description)
    cli.add_argument("-c", "--config", metavar="FILE", default=config, required=config is None, help="experiment file")
    cli.add_argument("--json", metavar="OUT", type=Path, help="write commit, device, command and figures here")
    cli.add_argument("--quick", action="store_true", help="a smaller run of about a minute, to see that it works")
    cli.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    return cli


def parse(cli: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line and check the common options.

    Raises:
        UserError: an override is not ``key=value``, or ``--json`` names no JSON file.
    """
    words = sys.argv[1:] if arguments is None else arguments
    # Move overrides to the front: an option with several values would swallow the ones after it.
    files = {index for index, word in enumerate(words, 1) if word in ("-c", "--config", "--json")}
    moved = [index for index, word in enumerate(words) if index not in files and re.match(r"[\w.][\w.-]*=", word)]
    rest = [word for index, word in enumerate(words) if index not in moved]
    options = cli.parse_intermixed_args([*(words[index] for index in moved), *rest])
    for text in options.overrides:
        if "=" not in text:
            raise UserError(f"{text}: settings are given as key=value")
    if options.json is not None and options.json.suffix != ".json":
        raise UserError(f"--json {options.json}: give a file that ends in .json")
    return options


def run(main: Callable[[Sequence[str] | None], None]) -> int:
    """Run a benchmark and return its exit code: 2 for an error the user can fix, 130 after Ctrl-C or SIGTERM."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        main(None)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command resumes trainings in a run folder", file=sys.stderr)
        return INTERRUPTED
    return 0


def load(options: argparse.Namespace, *overrides: str) -> Experiment:
    """Load the experiment of ``-c`` with the user's overrides, then those of the benchmark."""
    return load_experiment(options.config, [*options.overrides, *overrides])


def call(command: str, options: argparse.Namespace, *overrides: str) -> None:
    """Run a command of ``ddm_lightning`` as a user would, on the experiment of ``load``.

    Raises:
        UserError: the command failed; it has printed the reason.
    """
    arguments = [command, "-c", str(options.config), *options.overrides, *overrides]
    # In a session of its own, so that Ctrl-C in the terminal reaches this process alone, which passes it on once.
    process = subprocess.Popen([sys.executable, "-m", "ddm_lightning", *arguments], start_new_session=True)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise UserError(f"python -m ddm_lightning {shlex.join(arguments)}: ended with code {code}; see above")


def console() -> Console:
    """Console for tables; 130 columns wide unless it is a terminal."""
    return Console() if sys.stdout.isatty() else Console(width=130)


def use_all_threads() -> None:
    """Use all cores, or ``OMP_NUM_THREADS`` of them; training uses one thread per process."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def progress(console: Console) -> Progress:
    """Progress bars with counts, elapsed time and remaining time."""
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(),
        MofNCompleteColumn(),
        time_column(),
        console=console,
    )


class Report:
    """Table for people and named figures for programs."""

    def __init__(self, title: str, headings: Sequence[str]) -> None:
        self.title = title
        self.headings = list(headings)
        self.rows: list[list[str]] = []
        self.notes: list[str] = []
        self.figures: dict[str, float] = {}

    def row(self, *cells: str) -> None:
        """Add a row of the table."""
        self.rows.append(list(cells))

    def note(self, line: str) -> None:
        """Add a line below the table."""
        self.notes.append(line)

    def show(self, console: Console) -> None:
        """Print the table and its notes."""
        table = Table(title=self.title, title_justify="left")
        for index, heading in enumerate(self.headings):
            table.add_column(heading, justify="left" if index == 0 else "right")
        for cells in self.rows:
            table.add_row(*cells)
        console.print(table)
        for line in self.notes:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def write(self, path: Path | None) -> None:
        """Write the figures to ``path`` and the table to the Markdown file beside it; None writes nothing."""
        if path is None:
            return
        origin = {"commit": commit(), "device": device(), "command": command()}
        atomic_write_json(path, {**origin, "figures": self.figures})
        atomic_write_text(path.with_suffix(".md"), self.markdown(origin))
        print(f"results: {path}, {path.with_suffix('.md')}")

    def table_lines(self) -> list[str]:
        """The table alone as Markdown."""
        alignment = [":--", *["--:"] * (len(self.headings) - 1)]
        bar = "\\|"  # a plain bar would end the cell
        return [
            f"| {' | '.join(cell.replace('|', bar) for cell in cells)} |"
            for cells in (self.headings, alignment, *self.rows)
        ]

    def markdown(self, origin: Mapping[str, str]) -> str:
        """The table, its notes and the origin of its figures as Markdown."""
        notes = [line for note in self.notes for line in (note, "")]
        facts = [f"- {name}: `{value}`" for name, value in origin.items()]
        return "\n".join([f"# {self.title}", "", *self.table_lines(), "", *notes, *facts, ""])


def commit() -> str:
    """Commit of this repository, followed by ``+changes`` if tracked files outside ``results/`` differ from it."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        name = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    except FileNotFoundError:
        return "unknown: git is not installed"
    return "unknown: no git repository" if name is None else name + ("+changes" if changes else "")


def device() -> str:
    """Processor, GPU if torch sees one, and torch's version."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    parts = [f"{model}, {os.cpu_count()} cores"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join([*parts, f"torch {torch.__version__}"])


def command() -> str:
    """Command line of this benchmark, with paths relative to the repository's root."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(REPOSITORY) if script.is_relative_to(REPOSITORY) else script
    return shlex.join(["python", str(shown), *sys.argv[1:]])


def by_time(prefix: str, times: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Figures such as ``router_accuracy_t0.50``."""
    return {f"{prefix}_t{t:.2f}": value for t, value in zip(times, values, strict=True)}


def save_figure(path: Path, figure: Figure) -> None:
    """Write ``figure`` to ``path`` as PNG, atomically."""
    atomic_write(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
