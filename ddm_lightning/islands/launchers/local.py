"""Launcher for this machine: one background process per member, all at once."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from ddm_lightning.core.processes import start_time
from ddm_lightning.core.registry import LAUNCHERS
from ddm_lightning.islands.job import Job, Launcher
from ddm_lightning.islands.local import gpu_variables, start_in_background
from ddm_lightning.members.status import MemberStatus


@LAUNCHERS.register("local")
class LocalLauncher(Launcher):
    """Starts members that outlive the terminal. ``fit`` of several members, in contrast, waits for them."""

    handles = r"\d{1,9} \d*"

    def submit(self, job: Job) -> str:
        job.folder.mkdir(parents=True, exist_ok=True)
        gpus = gpu_variables(job.number, job.island.accelerator, job.island.devices)
        process = start_in_background(job.command(), job.folder / "log.txt", {**job.environment, **gpus})
        return f"{process.pid} {start_time(process.pid)}"

    def is_active(self, handle: str) -> bool:
        pid, _, began = handle.partition(" ")
        return MemberStatus("", 0, pid=int(pid), began=began).runs()

    def cancel(self, handle: str) -> None:
        if self.is_active(handle):
            with suppress(ProcessLookupError):
                os.kill(int(handle.split()[0]), signal.SIGTERM)
