"""Launcher for clouds by SkyPilot: one job group with a task per member, each on a machine of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError, say
from ddm_lightning.core.files import atomic_write_text
from ddm_lightning.core.processes import STOPPED
from ddm_lightning.core.registry import LAUNCHERS
from ddm_lightning.islands.job import Job, Launcher, ask

_RECOVERY = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 3, "recover_on_exit_codes": [STOPPED]}
_ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
_NONE = "No in-progress managed jobs"
_NAMES: checks.Check = (lambda names: all(map(str.isidentifier, names)), "a list, each the name of a variable")
_SETUP = (
    "python3 -m venv --system-site-packages .venv && "
    ".venv/bin/pip install -c <(grep -v ^torch constraints.txt) -e '.[latents]'"
)


@LAUNCHERS.register("sky")
@dataclass
class SkyLauncher(Launcher):
    """Starts the members of one call as a job group; SkyPilot replaces the machine of each that is preempted."""

    handles = r"[^-].*/.+"
    accelerators: list[str] = field(default_factory=list)
    """GPUs, any of which will do: ``[H100, A100-80GB]``; a member gets ``island.devices`` of one kind."""
    use_spot: bool = True
    """Whether to rent machines that the cloud may take back, which costs less."""
    infra: str | None = None
    """Cloud, with region if it matters: ``aws/us-east-1``; null for the cheapest that has the GPUs."""
    workdir: str = "."
    """Clone of the repository on this machine, which SkyPilot copies to the others."""
    setup: str = _SETUP
    """Commands that install it there."""
    python: str = ".venv/bin/python"
    """Interpreter there, relative to the clone."""
    secrets: list[str] = field(default_factory=list, metadata={"check": _NAMES})
    """Variables of this shell to hand on, such as ``[AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY]``; names only."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further keys of each task, such as ``{resources: {disk_size: 512}}``."""

    def __post_init__(self) -> None:
        self.devices = self.accelerators

    def submit(self, job: Job) -> str:
        return next(self.submit_all([job]))

    def submit_all(self, jobs: Sequence[Job]) -> Iterator[str]:
        if not jobs:
            return

        group = f"{jobs[0].run}-{uuid.uuid4().hex[:6]}".replace(".", "-")
        path = jobs[0].folder.parents[1] / "sky" / f"{group}.yaml"
        _program()  # before anything is written
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, self._file(group, jobs))
        say(f"sky jobs launch {path}: takes minutes")
        secrets = []
        for name in self.secrets:
            secrets += ["--secret", name]

        _sky("launch", "--yes", "--detach-run", *secrets, str(path))
        yield from (f"{group}/{job.member}" for job in jobs)

    def is_active(self, handle: str) -> bool:
        return handle in self._active

    def cancel(self, handle: str) -> None:
        self.cancel_all([handle])

    def cancel_all(self, handles: Sequence[str]) -> None:
        for group in sorted({handle.partition("/")[0] for handle in handles}):
            others = [other for other in self._active if other.startswith(f"{group}/") and other not in handles]
            if others:
                raise UserError(f"SkyPilot stops a job group as a whole; stop these members, too: {', '.join(others)}")

            _sky("cancel", "--yes", "--name", group)

    def describe_all(self, jobs: Sequence[Job]) -> str:
        return self._file(jobs[0].run, jobs)

    @cached_property
    def _active(self) -> list[str]:
        """Handles of the tasks that run or wait."""
        printed = _sky("queue", "--all", "--output", "json")
        for start in re.finditer(r"^\[", printed, re.MULTILINE):  # other lines may come before and after
            with suppress(ValueError, TypeError, KeyError):
                tasks, _ = json.JSONDecoder().raw_decode(printed, start.start())
                active = [task for task in tasks if not task["status"].startswith(_ENDED)]
                return [f"{task['job_name']}/{task['task_name']}" for task in active]

        if printed:
            raise UserError("sky jobs queue: prints no list of jobs; see launch.sky, and try sky jobs queue by hand")

        return []

    def _file(self, group: str, jobs: Sequence[Job]) -> str:
        header = {"name": group, "execution": "parallel", "inter_connection": False}
        return yaml.safe_dump_all([header, *map(self._task, jobs)], sort_keys=False, width=1000)

    def _task(self, job: Job) -> dict[str, Any]:
        if job.uses_gpus and not self.accelerators:
            raise UserError(
                f"key 'launch.sky.accelerators': none for {job.member}, whose island.accelerator is gpu; "
                "set launch.sky.accelerators=[H100]"
            )

        resources: dict[str, Any] = {"use_spot": self.use_spot, "job_recovery": _RECOVERY}
        if self.accelerators:
            resources["accelerators"] = dict.fromkeys(self.accelerators, job.island.devices)
        if self.infra is not None:
            resources["infra"] = self.infra

        task = {
            "name": job.member,
            "workdir": self.workdir,
            "resources": resources,
            "envs": job.environment,
            "secrets": dict.fromkeys(self.secrets),
            "setup": self.setup,
            "run": shlex.join(job.command(self.python)),
        }
        merged: Any = OmegaConf.to_container(OmegaConf.merge(task, self.more))
        return dict(merged)


def _sky(*words: str) -> str:
    """Output of ``sky jobs``; empty if it has never had a job."""
    command = (_program(), "jobs", *words)
    prefix = f"sky jobs {words[0]}"
    return ask(*command, prefix=prefix, remedy="see launch.sky", nothing=_NONE, seconds=None)


def _program() -> str:
    """SkyPilot beside this interpreter, or another on the path, as it often has an environment of its own."""
    program = shutil.which("sky", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        raise UserError(
            "launch --on sky needs SkyPilot; install it with: pip install 'ddm_lightning[sky]' 'skypilot[aws]'"
        )

    return program
