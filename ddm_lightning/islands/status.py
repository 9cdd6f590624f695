"""Status of a run's members on all islands, read from its URL, and its table."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import UserError, redacted
from ddm_lightning.core.formatting import Shown, format_duration, table
from ddm_lightning.islands import lease
from ddm_lightning.members.roles import all_members, batch_size_of
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import MemberStatus, loss_of
from ddm_lightning.prepare.ledger import GROUP_SIZE
from ddm_lightning.shards.manifest import manifest_path

NOTES = {
    "silent": f"no heartbeat for {lease.STALE_SECONDS:g} s",
    "unclear": "its clock is ahead of this machine's, which tells nothing of it; status --watch does",
}
"""Meaning of states that only a look from elsewhere gives."""
_TEXTS = ("member", "state", "island", "device")
_NONE = "–"
_ALWAYS = ("loss", "held out", "accuracy", "samples/s")


@dataclass(frozen=True)
class Seen:
    """A member as it is seen from here."""

    status: MemberStatus
    """What it has published."""
    health: str
    """Its state; for one that should be training also ``killed``, or a key of ``NOTES``."""
    heartbeat_age: float | None = None
    """Seconds since its last heartbeat; None without a URL."""
    starts: int | None = None
    """Times that a process has claimed it; None without a URL."""
    seconds_left: float | None = None
    """Seconds to its last step at the present speed; None unless it is training."""

    def to_json(self) -> dict[str, Any]:
        """All of it, as plain JSON."""
        own = asdict(self)
        return own.pop("status") | {"shown_state": own.pop("health")} | own


class Status(Shown, list[Seen]):
    """Members of a run: a list, shown as a table.

    Args:
        run: their run.
        members: as ``Watch.look`` returns them.
    """

    def __init__(self, run: Run, members: Iterable[Seen]) -> None:
        super().__init__(members)
        self.title = redacted(run.url or str(run.folder.root))
        self.caption = preparing_line(run)
        if self.caption is None and manifest_path(run.folder.root).exists():
            self.caption = run.manifest.bucket_line

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Table without the columns on the right that do not fit."""
        rows = rows_of(self)
        headings = [*rows[0]] if rows else []
        while True:
            found = table(headings, [[row[heading] for heading in headings] for row in rows], self.title, _TEXTS)
            found.caption = self.caption
            found.caption_justify = "left"
            if len(headings) <= 2 or Console(width=10_000).measure(found).maximum <= options.max_width:
                break

            headings.pop()

        yield found


def open_to_watch(experiment: Experiment) -> Run:
    """Open a run to look at its members, perhaps while it is being prepared.

    Raises:
        UserError: it neither has a URL nor has begun here, or the URL cannot be read.
    """
    run = Run(experiment)
    if run.url or preparing_line(run):
        return run

    return Run.open(experiment)


class Watch:
    """Looks at the members of a run, again and again.

    The first look can only compare the islands' clocks with this machine's. From then on a heartbeat is as old as the
    time since it last changed here, whatever the clocks say.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._beats: dict[str, tuple[Any, float, bool]] = {}
        """By member: the newest heartbeat, when it was first seen here, and whether it has changed since the first."""

    def look(self) -> list[Seen]:
        """Read the status of the ensemble's members, and of others that have started: at the run's URL if it has one.

        Raises:
            UserError: the URL cannot be read, or a status in the run folder is damaged.
        """
        if self.run.url is None:
            statuses = [self.run.status(name) for name in self.run.started]
            return [self._seen(status, status.shown_state()) for status in statuses]

        with remote.reaching():
            found = [self._look_at(name) for name in all_members(self.run.experiment)]

        return [seen for seen in found if seen is not None]

    def _look_at(self, name: str) -> Seen | None:
        url = f"{self.run.url}/members/{name}/lease"
        generation = lease.newest_generation(url)
        if not generation:
            waiting = Seen(MemberStatus(name, self.run.max_steps(name)), "waiting", starts=0)
            if name in self.run.names:
                return waiting

            return None

        content = lease.read_lease(url, generation)
        status = MemberStatus(name, self.run.max_steps(name), host=content.host)
        with suppress(UserError):
            found = checks.record(content.status, MemberStatus, url, "wait for its next heartbeat")
            if found.member == name:
                status = found

        if status.state == "waiting":  # before its first own status
            status.state = "starting"

        age = self._age(name, (generation, content.beat), content.time)
        return self._seen(status, _health(status.state, content, age), age, generation)

    def _age(self, name: str, beat: Any, written: float) -> float:
        now = time.monotonic()
        last, since, has_changed = self._beats.setdefault(name, (beat, now, False))
        if beat != last:
            self._beats[name] = (beat, now, True)
            return 0.0

        watched = now - since
        by_clocks = time.time() - written
        if has_changed:
            return watched
        if watched >= lease.STALE_SECONDS:
            return max(watched, by_clocks)

        return by_clocks

    def _seen(self, status: MemberStatus, health: str, age: float | None = None, starts: int | None = None) -> Seen:
        left = None
        if health == "training" and status.samples_per_second > 0:
            batch_size = batch_size_of(status.member, self.run.experiment)
            seconds = (status.max_steps - status.step) * batch_size / status.samples_per_second
            if math.isfinite(seconds):
                left = seconds

        return Seen(status, health, age, starts, left)


def _health(state: str, content: lease.Claim, age: float) -> str:
    """State of a member by what it last said, ``age`` seconds ago, and by its process if that is on this machine."""
    if state not in ("starting", "training"):
        return state
    if content.released:
        return "stopped"

    runs = lease.runs_here(content)
    if runs:
        return state
    if runs is False:
        return "killed"
    if age >= lease.STALE_SECONDS:
        return "silent"
    if age <= -lease.STALE_SECONDS:
        return "unclear"

    return state


def preparing_line(run: Run) -> str | None:
    """Progress of ``prepare`` on all machines that share the run's URL, or of the one here; None once it is done."""
    root = str(run.folder.prepared)
    if run.url:
        root = f"{run.url}/{run.folder.prepared.name}"

    with remote.reaching():
        top = remote.files(root, recursive=False)
        if "manifest.json" in top or "parts.json" not in top:
            return None

        try:
            num_parts = len(json.loads(remote.read(f"{root}/parts.json")))
        except (ValueError, TypeError, RecursionError):
            return f"prepare: {root}/parts.json is damaged"

        # Here, a part is a folder that holds its record; at a URL, its record is a file beside others.
        parts = _num_records(f"{root}/parts", not run.url)
        groups = _num_records(f"{root}/groups", not run.url)

    num_groups = math.ceil(num_parts / GROUP_SIZE)
    return f"prepare: {parts:,} of {num_parts:,} parts encoded, {groups:,} of {num_groups:,} groups of shards written"


def _num_records(url: str, recursive: bool) -> int:
    files = remote.files(url, recursive)
    return sum(name.endswith(".json") and size > 0 for name, size in files.items())


def rows_of(members: Sequence[Seen]) -> list[dict[str, str]]:
    """Texts of each member's figures by heading; some headings are left out if they are empty for all."""
    rows = [_row(seen) for seen in members]
    if not rows:
        return []

    headings = [key for key in rows[0] if key in _ALWAYS or any(row[key] != _NONE for row in rows)]
    return [{key: row[key] for key in headings} for row in rows]


def _row(seen: Seen) -> dict[str, str]:
    status = seen.status
    metrics = status.metrics
    age = seen.heartbeat_age
    heartbeat = _duration(age and abs(age))
    if age is not None and age <= -1:
        heartbeat += " ahead"

    state = seen.health
    if state == "done" and status.step < status.max_steps:
        state = "done early"

    time = island = device = _NONE
    if seen.starts is None:
        minutes, seconds = divmod(round(status.seconds), 60)
        time = f"{minutes}:{seconds:02d}"
    else:
        island = _printable(status.host)
        device = _printable(status.device)

    return {
        "member": status.member,
        "state": state,
        "step": f"{status.step}/{status.max_steps}",
        "loss": _figure(loss_of(metrics, "train"), ".4f"),
        "held out": _figure(loss_of(metrics, "held_out"), ".4f"),
        # Without the condition, as the router's loss.
        "accuracy": _figure(metrics.get("held_out/accuracy"), ".1%"),
        "time": time,
        "samples/s": _figure(status.samples_per_second or None, ".0f"),
        "MFU": _figure(metrics.get("train/mfu"), ".1%"),
        "ETA": _duration(seen.seconds_left),
        "heartbeat": heartbeat,
        "starts": str(seen.starts or _NONE),
        "island": island,
        "device": device,
    }


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _NONE

    return format_duration(max(round(seconds), 1))


def _printable(text: str) -> str:
    """A stranger's text without codes for the terminal; a dash if it is empty."""
    return "".join(filter(str.isprintable, text)) or _NONE


def _figure(value: float | None, form: str) -> str:
    # Keeps a diverged loss as narrow as the others.
    if value is None:
        return _NONE
    if abs(value) >= 1e5:
        form = ".2g"

    return format(value, form)
