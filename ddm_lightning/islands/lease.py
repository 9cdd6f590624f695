"""Leases: one process at a time trains a member, wherever it runs, and says at the run's URL that it is alive.

Each claim has a generation, and each generation a file ``members/NAME/lease/GENERATION.json`` of its own, created in
one step and written by its process alone. Whoever finds the newest one without a heartbeat creates the next. A process
that was taken over finds a newer generation before it completes what it sends, and stops. No clock is compared with
another machine's: a lease is stale if it does not change while somebody watches.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import UserError, say
from ddm_lightning.core.files import parse_json
from ddm_lightning.core.processes import start_time

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 45.0
"""Time without a heartbeat after which a lease may be taken over: four are missing."""
_POLL_SECONDS = 3.0


@dataclass
class Claim:
    """Content of a claim's file; all empty if the file is damaged."""

    key: str = ""
    """Random, so that no two claims are equal."""
    host: str = ""
    """Name of the machine."""
    machine: str = ""
    """Identifies this start of the machine; empty if unknown."""
    pid: checks.Count = 0
    """Process that trains the member."""
    began: str = ""
    """Start of that process."""
    beat: checks.Count = 0
    """Number of the newest heartbeat."""
    time: float = 0.0
    """Unix time of it, by the machine's clock."""
    released: bool = False
    """Whether another process may claim the member at once."""
    status: dict[str, Any] = field(default_factory=dict)
    """Progress for others to read: a ``MemberStatus``."""


class LostLeaseError(Exception):
    """Another process has taken the member over."""


class Lease:
    """This process's claim of a member; made by ``claim``.

    Args:
        url: folder of the member's leases.
        generation: number of the claim, from 1.
        content: what its file holds.
    """

    def __init__(self, url: str, generation: int, content: Claim) -> None:
        self.url = url
        self.generation = generation
        self._content = content

    def beat(self, status: Mapping[str, Any], *, released: bool = False) -> None:
        """Say that the process is alive, or that it is done.

        Args:
            status: progress for others to read.
            released: whether another process may claim the member at once.

        Raises:
            OSError: the store cannot be reached.
        """
        content = self._content
        content.beat += 1
        content.time = time.time()
        content.released = released
        content.status = {**status, "updated": content.time}
        remote.write(_file(self.url, self.generation), _encoded(content))

    def check(self) -> None:
        """Check that no other process has taken the member over; call it before publishing.

        Raises:
            LostLeaseError: one has.
            OSError: the store cannot be reached.
        """
        try:
            other = read_lease(self.url, self.generation + 1)  # not from a listing, which may be older
        except FileNotFoundError:
            return

        if other.key or newest_generation(self.url) > self.generation:
            raise LostLeaseError(f"a process on {other.host or 'another machine'} has taken it over")


def claim(member: str, url: str) -> Lease:
    """Claim a member for this process.

    Waits up to ``STALE_SECONDS`` to see whether the process of an earlier claim is alive, unless that was released or
    was of this machine.

    Args:
        member: its name, for messages.
        url: folder of its leases.

    Raises:
        UserError: another process trains the member.
        OSError: the store cannot be reached.
    """
    pid = os.getpid()
    own = Claim(uuid.uuid4().hex, platform.node(), _machine(), pid, start_time(pid), time=time.time())
    taken = 0  # a listing may be older than what is known
    while True:
        generation = max(taken, newest_generation(url))
        if generation and _is_alive(url, generation, member):
            other = read_lease(url, generation)
            raise UserError(
                f"{member}: is in use by process {other.pid} on {other.host}, which is alive; wait for it or stop it"
            )

        if remote.create(_file(url, generation + 1), _encoded(own)):
            return Lease(url, generation + 1, own)

        taken = generation + 1


def newest_generation(url: str) -> int:
    """Number of the newest claim below ``url``; 0 if there is none.

    Raises:
        OSError: the store cannot be reached.
    """
    stems = [name.removesuffix(".json") for name in remote.files(url)]
    return max((int(stem) for stem in stems if stem.isascii() and stem.isdigit()), default=0)


def read_lease(url: str, generation: int) -> Claim:
    """Content of a claim; empty if it is damaged.

    Raises:
        OSError: the store cannot be reached.
    """
    file = _file(url, generation)
    try:
        return checks.record(parse_json(remote.read(file)), Claim, file, "remove it")
    except (ValueError, UserError):
        return Claim()


def runs_here(content: Claim) -> bool | None:
    """Whether the process of a claim is alive; None if it is not of this start of this machine."""
    if not content.machine or content.machine != _machine():
        return None

    return start_time(content.pid) == content.began


def _is_alive(url: str, generation: int, member: str) -> bool:
    first = read_lease(url, generation)
    if first.released:
        return False

    runs = runs_here(first)
    if runs is not None:
        return runs

    say(f"{member}: waits {STALE_SECONDS:g} s to see whether its process on {first.host or 'a machine'} is alive")
    end = time.monotonic() + STALE_SECONDS
    while time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        newest = max(generation, newest_generation(url))
        now = read_lease(url, newest)
        if now.released:
            return False
        if newest > generation or (first.key and now.key and now != first):
            return True

        if not first.key:  # a store that answers garbage says nothing about the process
            first = now

    return False


def _machine() -> str:
    """Identify this start of the machine and its space of process ids, as a container has its own; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _encoded(content: Claim) -> bytes:
    return json.dumps(asdict(content)).encode()


def _file(url: str, generation: int) -> str:
    return f"{url}/{generation}.json"
