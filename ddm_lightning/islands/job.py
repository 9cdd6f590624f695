"""Jobs: what an island runs, as plain data, and the interface of the launchers that start them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.errors import UserError


@dataclass(frozen=True)
class Job:
    """The training of one member."""

    member: str
    run: str
    """Name of the experiment."""
    arguments: tuple[str, ...]
    """Command and options that follow ``python -m ddm_lightning``."""
    island: IslandConfig
    """Devices and settings of the member's island."""
    folder: Path
    """Folder of the member on this machine, for logs."""
    number: int = 0
    """Number of the member, which chooses its GPUs where members share a machine."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables to set."""
        return variables_of(self.island)

    @property
    def name(self) -> str:
        """Name of the job for a scheduler."""
        return f"{self.run}-{self.member}"

    @property
    def uses_gpus(self) -> bool:
        """Whether the island is asked for GPUs; one with ``accelerator: auto`` takes what it finds."""
        return self.island.accelerator == "gpu"

    def command(self, python: str = sys.executable) -> list[str]:
        """Words of the command line."""
        return [python, "-m", "ddm_lightning", *self.arguments]

    def line(self, python: str = "python") -> str:
        """The command line with its variables, for a shell."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command(python))])


def variables_of(island: IslandConfig) -> dict[str, str]:
    """Variables of a member's process."""
    return {"OMP_NUM_THREADS": str(island.num_threads), "PYTHONUNBUFFERED": "1"}


class Launcher(ABC):
    """Turns jobs into running processes. Progress is read at the run's URL, so a launcher knows nothing of training."""

    spans_nodes = False
    """Whether it can run a job on ``island.nodes`` nodes, in their places by ``core.environment.place_of``."""
    devices: Sequence[str] = ()
    """GPUs that it rents, by name."""
    handles = r"[^-].*"
    """Regular expression that its handles match; a run folder from elsewhere may hold forged ones."""

    @abstractmethod
    def submit(self, job: Job) -> str:
        """Start a job, or queue it.

        Returns:
            A handle for the other methods, also of a later process.

        Raises:
            UserError: the job cannot be started.
        """

    @abstractmethod
    def is_active(self, handle: str) -> bool:
        """Whether the job runs or waits in a queue.

        Raises:
            UnreachableError: the job's own machine cannot be asked.
            UserError: the engine cannot be asked.
        """

    @abstractmethod
    def cancel(self, handle: str) -> None:
        """Ask the job to write a checkpoint and stop; nothing happens if it has ended.

        Raises:
            UserError: the engine cannot be asked.
        """

    def describe(self, job: Job) -> str:
        """The job as this launcher would run it, for ``--dry-run``."""
        return job.line()

    # An engine that takes all jobs at once overrides these.

    def submit_all(self, jobs: Sequence[Job]) -> Iterator[str]:
        """Start jobs and yield the handle of each as soon as it has one.

        Raises:
            UserError: a job cannot be started.
        """
        return map(self.submit, jobs)

    def cancel_all(self, handles: Sequence[str]) -> None:
        """Stop jobs.

        Raises:
            UserError: the engine cannot be asked, or cannot stop these alone.
        """
        for handle in handles:
            self.cancel(handle)

    def describe_all(self, jobs: Sequence[Job]) -> str:
        """The jobs as this launcher would run them."""
        return "\n".join(map(self.describe, jobs))


class UnreachableError(UserError):
    """The machine of one job cannot be asked: it may be dead, or the job may still run."""


def ask(*command: str, prefix: str, remedy: str, nothing: str | None = None, seconds: float | None = 60.0) -> str:
    """Return what another program prints; other lines may be among it, such as a greeting.

    Args:
        command: its words.
        prefix: begins the error line.
        remedy: ends it.
        nothing: words by which the program says that there is nothing, for which the result is empty.
        seconds: time that it may take; None for any.

    Raises:
        UserError: it is not there, takes longer, or fails.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except OSError as error:
        raise UserError(f"{prefix}: {error}; {remedy}") from error
    except subprocess.TimeoutExpired:
        raise UserError(f"{prefix}: no answer within {seconds:g} s; {remedy}") from None

    if nothing is not None and nothing in done.stdout + done.stderr:
        return ""
    if not done.returncode:
        return done.stdout

    said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    raise UserError(f"{prefix}: {said.splitlines()[-1]}; {remedy}")
