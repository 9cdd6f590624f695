"""Launcher for a SLURM cluster by submitit: one job per member, requeued after a time limit or a preemption."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.processes import start_time
from ddm_lightning.core.registry import LAUNCHERS, require
from ddm_lightning.islands.job import Job, Launcher, ask

_ANY_NUMBER = 1_000_000


class Training:
    """Runs a member in a SLURM job; submitit pickles it into the shared run folder and calls it on each node."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        self._child = subprocess.Popen(self.command)
        code = self._child.wait()
        if code:
            raise RuntimeError(f"{' '.join(self.command)} ended with exit code {code}")

        return code

    def checkpoint(self) -> Any:
        """Wait until the member, which also got the signal, has written its checkpoint; then requeue it."""
        from submitit.helpers import DelayedSubmission

        # Not ``wait``, whose lock the interrupted call above may hold.
        while self._child is not None and start_time(self._child.pid):
            time.sleep(0.2)

        return DelayedSubmission(Training(self.command))


@LAUNCHERS.register("slurm")
@dataclass
class SlurmLauncher(Launcher):
    """Submits from a machine of the cluster; the run folder must be on a disk that the nodes share."""

    spans_nodes = True
    handles = r"\d+"
    partition: str | None = None
    """Partition; null for the cluster's default."""
    minutes: int = 1440
    """Time limit of a slot; the member is requeued and resumes until it is finished."""
    cpus_per_device: int = 4
    """Cores per device."""
    memory_gb: float | None = None
    """Memory of the node; null for the cluster's default."""
    notice_seconds: int = 120
    """Time before the limit at which the member is told to write its checkpoint and stop."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further options of ``sbatch``, such as ``{account: lab, qos: preemptible}``."""

    def __post_init__(self) -> None:
        require("launch --on slurm", "submitit", extra="slurm")

    def submit(self, job: Job) -> str:
        from submitit import AutoExecutor

        optional: dict[str, Any] = {}
        if job.uses_gpus:
            optional["gpus_per_node"] = job.island.devices
        if self.memory_gb is not None:
            optional["mem_gb"] = self.memory_gb
        if self.partition is not None:
            optional["slurm_partition"] = self.partition

        folder = job.folder.resolve() / "slurm"
        try:
            executor = AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=_ANY_NUMBER)
            executor.update_parameters(
                name=job.name,
                nodes=job.island.nodes,
                tasks_per_node=1,
                timeout_min=self.minutes,
                cpus_per_task=self.cpus_per_device * job.island.devices,
                slurm_signal_delay_s=self.notice_seconds,
                slurm_setup=[f"export {key}={value}" for key, value in job.environment.items()],
                slurm_additional_parameters=self.more,
                **optional,
            )
            return str(executor.submit(Training(job.command())).job_id)
        except Exception as error:  # submitit raises many kinds
            raise UserError(f"{job.member}: SLURM refuses the job: {first_line(error)}; see launch.slurm") from error

    def is_active(self, handle: str) -> bool:
        states = "PD,R,CF,CG,RQ,S,ST,SO,RS,SI"
        printed = _output("squeue", "--noheader", "--format=%i", "--jobs", handle, "--states", states)
        return any(line.split()[:1] == [handle] for line in printed.splitlines())

    def cancel(self, handle: str) -> None:
        _output("scancel", handle)

    def describe(self, job: Job) -> str:
        return f"sbatch {job.name}: {job.island.size}: {self}: {job.line()}"


def _output(*command: str) -> str:
    remedy = "run it on a machine of the SLURM cluster"
    return ask(*command, prefix=command[0], remedy=remedy, nothing="Invalid job id")
