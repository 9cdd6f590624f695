"""Launcher for machines that are reached by the system's ``ssh``: one host per member."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import LAUNCHERS
from ddm_lightning.islands.job import Job, Launcher, UnreachableError, ask

# Begins an answer: a host's shell may print lines of its own before it.
_MARK = "ddm_lightning:"


@LAUNCHERS.register("ssh")
@dataclass
class SshLauncher(Launcher):
    """Starts a member on its host in the background; the log is ``members/NAME/log.txt`` in the run folder there."""

    handles = r"[^-\s]\S* \d+"
    hosts: dict[str, str] = field(default_factory=dict)
    """Host of each member, as ``ssh`` takes it: ``{expert-0: alice@node-1, …}``."""
    folder: str = "ddm"
    """Clone of the repository on each host, with its set-up."""
    python: str = ".venv/bin/python"
    """Interpreter there, relative to ``folder``."""
    options: str = "-o BatchMode=yes -o ConnectTimeout=20"
    """Options of ``ssh``."""

    def __post_init__(self) -> None:
        self._ssh = ["ssh", *shlex.split(self.options)]

    def submit(self, job: Job) -> str:
        host = self._host(job)
        return f"{host} {self._answer(host, self._script(job))}"

    def is_active(self, handle: str) -> bool:
        host, _, pid = handle.rpartition(" ")
        # Another process may have got the id; a zombie has no command line. Not every system has /proc.
        is_member = f"[ ! -e /proc/{pid}/cmdline ] || grep -q ddm_lightning /proc/{pid}/cmdline"
        script = f"kill -0 {pid} 2>/dev/null && {{ {is_member}; }} && echo {_MARK}1 || echo {_MARK}0"
        try:
            return self._answer(host, script) == "1"
        except UserError as error:
            raise UnreachableError(str(error)) from error

    def cancel(self, handle: str) -> None:
        host, _, pid = handle.rpartition(" ")
        self._answer(host, f"kill -TERM {pid} 2>/dev/null; echo {_MARK}0")

    def describe(self, job: Job) -> str:
        return shlex.join(self._command(self._host(job), self._script(job)))

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
            f"cd {shlex.quote(self.folder.removeprefix('~/'))} && command -V {shlex.quote(self.python)} >&2 && "
            f"mkdir -p {shlex.quote(str(job.folder))} && "
            f"{{ nohup env {job.line(self.python)} >>{log} 2>&1 </dev/null & echo {_MARK}$!; }}"
        )

    def _command(self, host: str, script: str) -> list[str]:
        return [*self._ssh, host, f"sh -c {shlex.quote(script)}"]  # the user's own shell may be another

    def _answer(self, host: str, script: str) -> str:
        """Number that a script on the host prints after the mark."""
        prefix = f"ssh {host}"
        remedy = "check launch.ssh.hosts and try by hand"
        answers = re.findall(rf"{_MARK}(\d+)", ask(*self._command(host, script), prefix=prefix, remedy=remedy))
        if not answers:
            raise UserError(f"{prefix}: its shell did not run the command; {remedy}")

        return str(answers[-1])
