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
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, TypeVar

import torch
from matplotlib.figure import Figure
from rich.console import Console

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json, atomic_write_text
from ddm_lightning.core.formatting import Bars, table

REPOSITORY = Path(__file__).resolve().parents[1]
TINY = REPOSITORY / "experiments" / "tiny_2x.yaml"
MEMBER = "expert-0"
"""The member that benchmarks of a training step or of one training train."""
LOGS_SAMPLES = "island.callbacks=[{name: sample-log}]"
"""Setting that writes each step's sample ids to the member's folder, by a plug-in of ``tests``."""
GRIDS = ((8, 8), (6, 10), (10, 6), (4, 17), (17, 4), (7, 9), (9, 7), (5, 13), (13, 5))
"""Rows and columns of the patches of nine shapes: as many together as of nine squares."""
ACCELERATORS = {"cpu": "cpu", "cuda": "gpu"}
"""``island.accelerator`` by the type of a device."""
INTERRUPTED = 130
T = TypeVar("T")


def parser(
    description: str, *, config: str | None = None, fixed: bool = False, device: bool = False
) -> argparse.ArgumentParser:
    """Make a parser with the options common to all benchmarks.

    Args:
        description: the benchmark's docstring.
        config: default of ``-c``.
        fixed: leave out ``-c`` and overrides; the experiment is ``tiny_2x.yaml``.
        device: add ``--device``; see ``device_of``.
    """
    cli = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--json", metavar="OUT", type=Path, help="write commit, device, command and figures here")
    cli.add_argument("--quick", action="store_true", help="a smaller run of about a minute, to see that it works")
    if device:
        cli.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")

    if fixed:
        cli.set_defaults(config=str(TINY), overrides=[])
        return cli

    cli.add_argument("-c", "--config", metavar="FILE", default=config, required=config is None, help="experiment file")
    cli.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    return cli


def parse(cli: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; settings ``key=value`` may stand anywhere."""
    words = sys.argv[1:] if arguments is None else arguments
    # Settings first: an option with several values would swallow those after it.
    is_setting = re.compile(r"[\w.][\w.-]*=").match
    return cli.parse_args(sorted(words, key=lambda word: not is_setting(word)))


def run(main: Callable[[Sequence[str] | None], None]) -> None:
    """Run a benchmark; exit with code 2 after an error the user can fix, with 130 after Ctrl-C or SIGTERM."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        main(None)
    except (UserError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes trainings in a run folder", file=sys.stderr)
        sys.exit(INTERRUPTED)


def load(options: argparse.Namespace, *overrides: str) -> Experiment:
    """Load the experiment of ``-c`` with the user's overrides, then those of the benchmark."""
    return load_experiment(options.config, [*options.overrides, *overrides])


def device_of(options: argparse.Namespace) -> torch.device:
    """Device of ``--device``; a GPU if there is one and none is named.

    Raises:
        UserError: there is no GPU.
    """
    if torch.cuda.is_available():
        return torch.device(options.device or "cuda")
    if options.device == "cuda":
        raise UserError("--device cuda: torch sees no CUDA device here; give --device cpu")

    return torch.device("cpu")


class Child(subprocess.Popen[bytes]):
    """A module of Python in a process of its own, with the code of this repository.

    It has a session of its own, so that Ctrl-C in the terminal reaches this process alone, which passes it on once.

    Args:
        words: what follows ``python -m``.
        shown: let it print to the terminal.
        before: words before Python's own, such as ``unshare …``.
        variables: of its environment.
    """

    running: ClassVar[list[Child]] = []
    """All of them that nobody has ended; see ``all_of``."""
    seconds: ClassVar[float | None] = None
    """Limit of ``ended``, which then kills it."""

    def __init__(
        self,
        *words: str,
        shown: bool = False,
        before: Sequence[str] = (),
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.words = words
        self.log = None
        if not shown:
            self.log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by ``output``

        # The tests' plug-ins, for ``LOGS_SAMPLES``.
        paths = [str(REPOSITORY), str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, **variables}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        super().__init__(
            [*before, sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        self.running.append(self)

    def children(self) -> list[int]:
        """Process ids of those that it has started."""
        found: list[int] = []
        for file in Path(f"/proc/{self.pid}/task").glob("*/children"):
            found += map(int, file.read_text().split())

        return sorted(found)

    def output(self) -> str:
        """Return what it printed; call it once, after the end."""
        if self.log is None:
            return "see above"

        with self.log:
            self.log.seek(0)
            return self.log.read().decode(errors="replace")

    def ended(self, code: int = 0) -> str:
        """Wait for the end with the exit code ``code``, and return what it printed.

        Raises:
            UserError: another exit code.
            KeyboardInterrupt: this process or the child was interrupted.
        """
        try:
            self.wait(self.seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        except KeyboardInterrupt:
            self.send_signal(signal.SIGINT)
            self.wait()
            raise

        self.wait()
        output = self.output()
        if self.returncode == code:
            return output
        if self.returncode == INTERRUPTED:
            raise KeyboardInterrupt

        last = output.strip().rpartition("\n")[2]
        command = f"python -m {shlex.join(self.words)}"
        raise UserError(f"{command}: ended with code {self.returncode}, not {code}: {last}\n{output[-2000:]}")


def start(command: str, options: argparse.Namespace, *overrides: str, shown: bool = False) -> Child:
    """Start a command of ``ddm_lightning`` as a user would, on the experiment of ``load``."""
    return Child("ddm_lightning", command, "-c", str(options.config), *options.overrides, *overrides, shown=shown)


def call(command: str, options: argparse.Namespace, *overrides: str) -> None:
    """Run a command of ``ddm_lightning`` in the terminal, on the experiment of ``load``.

    Raises:
        UserError: the command failed; it has printed the reason.
    """
    start(command, options, *overrides, shown=True).ended()


def all_of(futures: Sequence[Future[T]], title: str = "") -> list[T]:
    """Wait for all results; after an error or Ctrl-C, end children and start no others.

    Args:
        futures: running in the threads or processes of one pool.
        title: of a progress bar; none is shown if it is empty.
    """
    with Bars(show=bool(title)) as bars:
        try:
            for one in bars.track(as_completed(futures), len(futures), description=title):
                one.result()
        except BaseException:
            for one in futures:
                one.cancel()

            while wait(futures, 0.1).not_done:
                # Ask each to stop, once; a thread may have started another one meanwhile.
                while Child.running:
                    Child.running.pop().terminate()

            raise

    return [one.result() for one in futures]


@contextmanager
def store(folder: Path, kind: str = "s3") -> Iterator[tuple[str, Any]]:
    """Serve ``folder / "store"`` by a server of the tests on loopback.

    Args:
        folder: receives what the server needs.
        kind: ``s3`` or ``sftp``.

    Yields:
        The URL, and the line to the server, which can be cut.
    """
    sys.path.append(str(REPOSITORY / "tests" / "shards"))
    import servers  # type: ignore[import-not-found]  # of the tests

    (folder / "store").mkdir(parents=True, exist_ok=True)
    environment = SimpleNamespace(setenv=os.environ.__setitem__)  # as pytest's monkeypatch
    with getattr(servers, kind)(folder / "store", folder, environment) as served:
        yield served


class Report:
    """Table for people and named figures for programs.

    Args:
        title: what is measured.
        headings: of the columns.
    """

    def __init__(self, title: str, headings: Sequence[str]) -> None:
        self.title = title
        self.headings = headings
        self.rows: list[list[str]] = []
        self.notes: list[str] = []
        self.figures: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        """What else the JSON file shall hold."""

    def row(self, *cells: str) -> None:
        """Add a row of the table."""
        self.rows.append(list(cells))

    def note(self, line: str) -> None:
        """Add a line below the table."""
        self.notes.append(line)

    def show(self) -> None:
        """Print the table and its notes."""
        console = Console()
        if not console.is_terminal:
            console.width = 130

        texts = self.headings[:1]
        console.print(table(self.headings, self.rows, self.title, texts))
        print(*self.notes, sep="\n")

    def finish(self, path: Path | None) -> None:
        """Print the report; write it if a path is given."""
        self.show()
        self.write(path)

    def write(self, path: Path | None) -> None:
        """Write the figures to ``path`` and the table to the Markdown file beside it; None writes nothing."""
        write_results(path, [self], origin_of_results(), {"figures": self.figures, **self.details})

    def table_lines(self) -> list[str]:
        """The table alone as Markdown."""
        alignment = [":--", *["--:"] * (len(self.headings) - 1)]
        lines = []
        for cells in (self.headings, alignment, *self.rows):
            lines.append(f"| {' | '.join(cells)} |")

        return lines

    def lines(self) -> list[str]:
        """The table and its notes as Markdown."""
        lines = [f"# {self.title}", "", *self.table_lines(), ""]
        for note in self.notes:
            lines += [note, ""]

        return lines


def write_results(
    path: Path | None, reports: Sequence[Report], origin: Mapping[str, str], contents: Mapping[str, Any]
) -> None:
    """Write ``contents`` and their origin to ``path``, and tables to a Markdown file beside it; None writes nothing."""
    if path is None:
        return

    lines = []
    for report in reports:
        lines += report.lines()

    for name, value in origin.items():
        lines.append(f"- {name}: `{value}`")

    atomic_write_json(path, {**origin, **contents})
    atomic_write_text(path.with_suffix(".md"), "\n".join([*lines, ""]))
    print(f"results: {path}, {path.with_suffix('.md')}")


def origin_of_results() -> dict[str, str]:
    """Commit, device and command line."""
    script, *options = sys.argv
    command = ["python", os.path.relpath(script, REPOSITORY), *options]
    return {"commit": commit(), "device": device(), "command": shlex.join(command)}


def commit() -> str:
    """Commit of this repository, followed by ``+changes`` if tracked files outside ``results/`` differ from it."""
    git = "git status --porcelain=v2 --branch --untracked-files=no -- . :!benchmarks/results"
    try:
        oid, *lines = subprocess.check_output(git.split(), cwd=REPOSITORY, text=True).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git repository"

    name = oid.rpartition(" ")[2]
    if not lines[-1].startswith("#"):
        return f"{name}+changes"

    return name


def device() -> str:
    """Processor, GPU if torch sees one, and torch's version."""
    name = platform.machine()
    with suppress(OSError, IndexError):  # on Linux and x86-64 alone
        name = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]

    parts = [name, f"{os.cpu_count()} cores", f"torch {torch.__version__}"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())

    return ", ".join(parts)


def save_figure(path: Path, figure: Figure) -> None:
    """Write ``figure`` to ``path`` as PNG, atomically."""
    atomic_write(path, lambda temporary: figure.savefig(temporary, format="png", dpi=120))
