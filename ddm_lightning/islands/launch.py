"""Launch a run's members on islands: start what neither runs nor is finished, and stop what runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, TypeAlias

from ddm_lightning.config.merge import island_of
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.files import atomic_write_json
from ddm_lightning.core.registry import LAUNCHERS
from ddm_lightning.islands.job import Job, Launcher, UnreachableError
from ddm_lightning.islands.status import Seen, Watch
from ddm_lightning.members.roles import all_members
from ddm_lightning.members.run import Run

_FILE = "launched.json"
"""In the run folder: launcher and handle of each member's newest job."""
_REMEDY = "stop what it started by hand, and delete it"
_Handle: TypeAlias = Annotated[list[checks.Text], (lambda job: len(job) == 2, "a launcher and its handle")]


def jobs_of(run: Run, members: Sequence[str], config: str, overrides: Sequence[str]) -> list[Job]:
    """Build the job of each member.

    Args:
        run: the run; it needs a URL.
        members: their names.
        config: experiment file, as every island finds it.
        overrides: those of the command line.

    Raises:
        UserError: the experiment has no ``remote``.
    """
    if run.url is None:
        raise UserError(f"{config}: key 'remote' is null: islands share nothing else; set remote=s3://… or a folder")

    jobs = []
    for name in members:
        job = Job(
            member=name,
            run=run.experiment.name,
            arguments=("fit", "-c", config, *overrides, f"member={name}"),
            island=island_of(name, run.experiment),
            folder=run.folder.member(name),
            number=all_members(run.experiment).index(name),
        )
        jobs.append(job)

    return jobs


def launch(run: Run, jobs: Sequence[Job], launcher: Launcher, on: str) -> dict[str, str]:
    """Start each member that is not running, queued or finished.

    Returns:
        What was done with each member: ``started`` and the job's handle, or why nothing was.

    Raises:
        UserError: the store or the engine cannot be reached; jobs started before are kept.
    """
    handles = _handles(run)
    done = {job.member: "" for job in jobs}
    for seen in Watch(run).look():
        name = seen.status.member
        if name in done:
            done[name] = _state(seen, run)

    for name in done:
        launched_on, handle = handles.get(name, ("", ""))
        if not done[name] and launched_on == on:
            try:
                if _is_active(launcher, handle):
                    done[name] = "queued"
            except UnreachableError as error:  # a dead machine can be replaced
                note(f"{error}; its member is taken for ended")

    to_start = [job for job in jobs if not done[job.member]]
    for job, handle in zip(to_start, launcher.submit_all(to_start), strict=True):
        done[job.member] = f"started ({handle})"
        handles[job.member] = [on, handle]
        atomic_write_json(run.folder.root / _FILE, handles)

    return done


def cancel(run: Run, members: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Ask members that ``launch`` of this run folder started to write a checkpoint and stop.

    Yields:
        Each member and what was done with it: ``stopped`` or ``not running``, and its job's handle.

    Raises:
        UserError: the engine cannot be asked or, once all others are stopped, the machine of a member.
    """
    handles = {name: handle for name, handle in _handles(run).items() if name in members}
    done = dict.fromkeys(members, "not running (no job of this run folder)")
    unknown = []
    for on in sorted({on for on, _ in handles.values()}):
        launcher = build_launcher(on, run)
        active = []
        for name, (other, handle) in handles.items():
            if other != on:
                continue

            try:
                is_active = _is_active(launcher, handle)
            except UnreachableError as error:
                unknown.append(f"{name} may still run: {error}")
                del done[name]
                continue

            if is_active:
                active.append(handle)
                done[name] = f"stopped ({handle})"
            else:
                done[name] = f"not running ({handle})"

        launcher.cancel_all(active)

    yield from done.items()
    if unknown:
        raise UserError("; ".join(unknown))


def build_launcher(name: str, run: Run, jobs: Sequence[Job] = ()) -> Launcher:
    """Build the launcher ``name`` with the experiment's ``launch.NAME``, for ``jobs``.

    Raises:
        UserError: it is unknown, refuses its params, or cannot run a job on several nodes.
    """
    launcher: Launcher = LAUNCHERS.build(name, run.experiment.launch.get(name, {}))
    for job in jobs:
        if job.island.nodes > 1 and not launcher.spans_nodes:
            raise UserError(
                f"key 'island.nodes' = {job.island.nodes} of {job.member}: --on {name} gives a member one node; "
                "use --on slurm, or start fit on each node"
            )

    return launcher


def _state(seen: Seen, run: Run) -> str:
    """``finished`` or ``running``; empty for neither or in doubt, because a needless process ends by itself."""
    if seen.health == "done" and seen.status.max_steps >= run.max_steps(seen.status.member):
        return "finished"
    if seen.health in ("starting", "training"):
        return "running"

    return ""


def _is_active(launcher: Launcher, handle: str) -> bool:
    if not re.fullmatch(launcher.handles, handle):
        raise UserError(f"{_FILE}: {handle!r} is no job of this launcher; {_REMEDY}")

    return launcher.is_active(handle)


def _handles(run: Run) -> dict[str, list[str]]:
    path = run.folder.root / _FILE
    if not path.exists():
        return {}

    return checks.read_record(path, dict[str, _Handle], "the list of launched jobs", _REMEDY)
