"""Train one member in this process, or several on this machine, each in a child process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from rich.console import Console

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import to_yaml
from ddm_lightning.config.merge import island_of
from ddm_lightning.core.devices import resolve_accelerator
from ddm_lightning.core.environment import Ranks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_text
from ddm_lightning.core.formatting import Bars
from ddm_lightning.core.processes import FITTED_BY, STARTED, STOPPED, end_imports, num_cores, on_stop_signal
from ddm_lightning.islands.job import variables_of
from ddm_lightning.islands.publish import published
from ddm_lightning.islands.slots import LEAVING_SECONDS, Slot, seconds_left
from ddm_lightning.members.cost import relative_cost
from ddm_lightning.members.member import Member
from ddm_lightning.members.preflight import refuse_stale
from ddm_lightning.members.run import Run
from ddm_lightning.training import ranks

POLL_SECONDS = 0.5


@dataclass
class _Child:
    member: str
    process: subprocess.Popen[bytes]
    group: int
    """Number of its group of GPUs."""
    log: Path


class Failure(NamedTuple):
    """End of a member that did not finish."""

    code: int
    """Exit code of its process; negative for a signal."""
    reason: str
    """Its error line, or the signal that ended it."""


@contextmanager
def _stop_requests() -> Iterator[list[float]]:
    """Yield a list that collects the times of stop signals.

    Raising an exception instead could interrupt this process between starting a child and recording it. A launcher may
    forward a signal that the terminal has also sent, so two within one poll count as one.
    """
    times: list[float] = []

    def receive(_number: int, _frame: FrameType | None) -> None:
        if not times or time.monotonic() > times[-1] + POLL_SECONDS:
            times.append(time.monotonic())

    with on_stop_signal(receive):  # SIGINT, too: a shell makes background commands ignore it
        yield times


def default_jobs(members: Sequence[str], experiment: Experiment) -> int:
    """Number of members that fit on this machine at once, by GPUs or by cores."""
    islands = [island_of(member, experiment) for member in members]
    if resolve_accelerator(experiment.island.accelerator) == "gpu":
        return max(1, torch.cuda.device_count() // max(island.devices for island in islands))

    return max(1, num_cores() // max(island.num_threads * island.devices for island in islands))


def gpu_variables(group: int, accelerator: str, devices: int) -> dict[str, str]:
    """Variables that give a member GPUs of its own, out of those that this process sees; none without GPUs.

    Args:
        group: number of its group of GPUs, from 0; groups beyond the last GPU share the first ones.
        accelerator: ``island.accelerator``.
        devices: GPUs of a group.
    """
    if resolve_accelerator(accelerator) != "gpu":
        return {}

    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    names = [name.strip() for name in visible.split(",")]
    first = group % max(1, count // devices) * devices
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[first : first + devices])}


def start_in_background(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that Ctrl-C in the terminal does not reach it.

    Args:
        command: its words.
        log: file to which its output is appended.
        variables: to set in its environment.
    """
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,
        )


def fit_on_island(member: Member, run: Run) -> str:
    """Train one member within the island's slot, and publish it at the run's URL if there is one.

    Returns:
        As ``fit_alone``.

    Raises:
        UserError: as ``fit_alone``, or torchrun started another number of ranks, the slot is too short, or another
            process trains the member.
    """
    mine = ranks.own_place(run.experiment.island)
    with run.claimed(), Slot(member, run, mine) as slot, published(member.name, run, mine) as publisher:
        slot.publisher = publisher
        slot.begin()
        return fit_alone(member, run, mine)


def fit_alone(member: Member, run: Run, mine: Ranks) -> str:
    """Train one member in this process or, on several devices, by a process for each.

    Returns:
        ``done`` or ``stopped``; ``told`` if another process, such as the first rank, reports which.

    Raises:
        UserError: the member cannot be trained, or its artifact is another experiment's.
    """
    refuse_stale([member], run)
    island = run.experiment.island
    # Other nodes may not have the artifact, and wait.
    is_needed = island.nodes > 1 or not run.is_finished(member.name)
    if island.num_ranks > 1 and is_needed and not mine.launched:
        end_imports()
        if member.initial is not None:
            _ = member.initial.path  # fetches it once, so that not every rank does
        if ranks.fit_on_ranks(run, mine) == "done":
            return "told"

        return "stopped"

    from ddm_lightning.training.fit import fit_member

    end_imports()
    with ranks.recorded():
        state = fit_member(member, run, mine).state

    ranks.report_state(mine, state)
    if not mine.is_first or (state == "stopped" and mine.agent):
        return "told"

    return state


def fit_members(members: Sequence[str], run: Run, jobs: int, console: Console) -> dict[str, Failure]:
    """Train ``members``, ``jobs`` at a time, the longest first. Skip finished ones.

    A failed member does not affect the others.

    Returns:
        Failure of each member that did not finish.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGUSR1. The children have written a checkpoint, or were killed by a
            second request.
        UserError: the shards are not prepared, or the name or params of a network are unknown.
    """
    names = [name for name in members if not run.is_finished(name)]
    # The longest trainings first, so that all finish at about the same time.
    waiting = sorted(names, key=lambda name: -relative_cost(run.member(name)))
    widest = max(island_of(name, run.experiment).devices for name in members)
    running: list[_Child] = []
    failures: dict[str, Failure] = {}
    with _stop_requests() as requests:
        try:
            with Bars(console) as progress:
                tasks = {}
                for member in members:
                    status = run.status(member)
                    tasks[member] = progress.add_task(
                        member,
                        start=False,
                        total=run.max_steps(member),  # a finished training may go on
                        completed=status.step,
                        note=status.state if run.is_finished(member) else "waiting",
                    )

                while (waiting or running) and not requests:
                    with suppress(OSError, UserError):  # island.lease_file is being written
                        if waiting and seconds_left(run.experiment.island) < LEAVING_SECONDS:
                            failures |= {name: Failure(STOPPED, "not started: the slot is over") for name in waiting}
                            waiting.clear()

                    free = sorted({*range(jobs)} - {child.group for child in running})
                    for group in free[: len(waiting)]:
                        if requests:
                            break

                        member = waiting.pop(0)
                        progress.start_task(tasks[member])
                        running.append(_start(member, group, run, widest))

                    _wait_for_any(running)
                    for child in list(running):
                        code = child.process.poll()
                        status = run.status(child.member)
                        if status.step:
                            note = status.note()
                        else:
                            note = status.state

                        progress.update(tasks[child.member], completed=status.step, note=note)
                        if code is not None:
                            running.remove(child)
                            if not run.is_finished(child.member):
                                failures[child.member] = Failure(code, _failure(child, code))

            if requests:
                raise KeyboardInterrupt
        finally:
            if running:
                _stop(running, requests, console)

    return failures


def _start(member: str, group: int, run: Run, widest: int) -> _Child:
    island = island_of(member, run.experiment)
    folder = run.folder.member(member)
    variables = {
        **gpu_variables(group, island.accelerator, widest),  # so that no two members share a GPU
        **variables_of(island),
        FITTED_BY: str(os.getpid()),
    }
    # Not the run's experiment.yaml, into which another fit may write the settings of another island meanwhile.
    settings = folder / "experiment.yaml"
    islands = run.experiment.islands
    if island.max_minutes is not None:  # from the start of this process, not of the child's
        left = max(0.01, island.max_minutes - (time.monotonic() - STARTED) / 60)
        islands = {**islands, member: {**islands.get(member, {}), "max_minutes": left}}

    atomic_write_text(settings, to_yaml(replace(run.experiment, islands=islands)))
    command = [sys.executable, "-m", "ddm_lightning", "fit", "-c", str(settings), f"member={member}"]
    log = folder / "log.txt"
    # Ctrl-C reaches only the parent, which stops the children in order.
    return _Child(member, start_in_background(command, log, variables), group, log)


def _wait_for_any(running: list[_Child]) -> None:
    """Wait until a child ends, at most for one poll."""
    if running:
        with suppress(subprocess.TimeoutExpired):
            running[0].process.wait(POLL_SECONDS)


def _failure(child: _Child, code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}; the same command resumes it"
    if code == STOPPED:
        return "stopped on request; the same command resumes it"

    lines = child.log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = []
    for line in lines:
        if line.startswith("error: "):
            errors.append(line.removeprefix("error: "))

    if errors and code == 2:
        return errors[-1]

    return f"exit code {code}; see {child.log}"


def _stop(running: list[_Child], requests: list[float], console: Console) -> None:
    """Tell each member to write a checkpoint, and wait as long as it takes: without it, its steps are lost."""
    num_before = len(requests)
    console.print("stopping: each member finishes its step and writes a checkpoint; press Ctrl-C again to kill them")
    for child in running:
        child.process.terminate()

    left = list(running)
    while left and len(requests) == num_before:
        _wait_for_any(left)
        left = [child for child in left if child.process.poll() is None]

    for child in left:
        child.process.kill()

    for child in left:
        if child.process.wait() == -signal.SIGKILL:
            console.print(f"{child.member}: killed before it wrote a checkpoint; it resumes at the previous one")
