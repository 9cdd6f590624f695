"""Launcher for machines that are reached by the system's ``ssh``: one host per member."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass, field

from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.registry import LAUNCHERS
from ddm_lightning.islands.job import Job, Launcher

_SECONDS = 60.0


@LAUNCHERS.register("ssh")
@dataclass
class SshLauncher(Launcher):
    """Starts a member on its host in the background; the log is ``members/NAME/log.txt`` in the run folder there."""

    hosts: dict[str, str] = field(default_factory=dict)
    """Host of each member, as ``ssh`` takes it: ``{expert-0: alice@node-1, …}``."""
    folder: str = "ddm_lightning"
    """Clone of the repository on each host, with its set-up."""
    python: str = ".venv/bin/python"
    """Interpreter there, relative to ``folder``."""
    options: str = "-o BatchMode=yes -o ConnectTimeout=20"
    """Options of ``ssh``."""

    def submit(self, job: Job) -> str:
        host = self._host(job)
        pid = self._run(host, self._script(job)).strip()
        if not pid.isdigit():
            raise UserError(f"{job.member}: {host} did not start it: {pid or 'no process id came back'}; try by hand")
        return f"{host} {pid}"

    def is_active(self, handle: str) -> bool:
        host, _, pid = handle.rpartition(" ")
        try:
            return self._run(host, f"kill -0 {int(pid)} 2>/dev/null && echo alive || true").strip() == "alive"
        except UserError as error:  # else a dead host could not be replaced
            note(f"{error}; its member is taken for ended")
            return False

    def cancel(self, handle: str) -> None:
        host, _, pid = handle.rpartition(" ")
        self._run(host, f"kill -TERM {int(pid)} 2>/dev/null || true")

    def describe(self, job: Job) -> str:
        return shlex.join(["ssh", *shlex.split(self.options), self._host(job), self._script(job)])

    def _host(self, job: Job) -> str:
        host = self.hosts.get(job.member)
        if not host or host.startswith("-"):
            raise UserError(
                f"key 'launch.ssh.hosts': none for {job.member}; add {job.member}: USER@HOST, or use --only"
            )
        return host

    def _script(self, job: Job) -> str:
        log = shlex.quote(str(job.folder / "log.txt"))
        return (
            f"cd {shlex.quote(self.folder)} && mkdir -p {shlex.quote(str(job.folder))} && "
            f"{{ nohup env {job.line(self.python)} >>{log} 2>&1 </dev/null & echo $!; }}"
        )

    def _run(self, host: str, script: str) -> str:
        command = ["ssh", *shlex.split(self.options), host, script]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"ssh {host}: {error}; check launch.ssh.hosts") from error
        if done.returncode:
            problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(f"ssh {host}: {problem}; check launch.ssh.hosts and try by hand")
        return done.stdout
