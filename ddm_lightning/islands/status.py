"""Progress of all members as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.members.artifact import read_meta
from ddm_lightning.members.member import MONOLITH, ensemble_members, train_config
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus, loss_of
from ddm_lightning.training.guard import skipped_of


def member_status(member: str, experiment: Experiment, run: RunFolder) -> MemberStatus:
    """Newest status of ``member``; a finished member's figures come from its artifact, which ``ema`` may change."""
    status = MemberStatus.read(run.member(member), member, train_config(member, experiment).max_steps)
    # A finished member that trains on has taken more steps than its artifact.
    if run.is_finished(member) and (meta := read_meta(run.artifact(member))).step >= status.step:
        status.state, status.step, status.metrics = "done", meta.step, {**status.metrics, **meta.metrics}
    return status


def shown_members(experiment: Experiment, run: RunFolder) -> list[str]:
    """Members of the ensemble, and the monolith once it has started."""
    return ensemble_members(experiment) + ([MONOLITH] if run.member(MONOLITH).exists() else [])


def members_table(experiment: Experiment, run: RunFolder) -> Table:
    """Steps, losses, router accuracy, time and speed of each member."""
    # Fits the 80 columns of a log file or a pipe.
    table = Table(
        title=Text(str(run.root)), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for heading in ("member", "state", "step", "loss", "held out", "accuracy", "time", "samples/s"):
        table.add_column(heading, justify="left" if heading in ("member", "state") else "right", no_wrap=True)
    for member in shown_members(experiment, run):
        status = member_status(member, experiment, run)
        metrics = status.metrics
        accuracy = metrics.get("held_out/accuracy")  # without the condition, as the router's loss
        minutes, seconds = divmod(round(status.seconds), 60)
        table.add_row(
            member,
            status.shown_state(),
            f"{status.step}/{status.max_steps}",
            _figure(loss_of(metrics, "train"), ".4f"),
            _figure(loss_of(metrics, "held_out"), ".4f"),
            _figure(accuracy, ".1%"),
            f"{minutes}:{seconds:02d}",
            _figure(status.samples_per_second or None, ".0f"),
        )
    return table


def skipped_lines(members: Sequence[str], run: RunFolder, replay: str) -> list[str]:
    """One line per member that skipped steps; ``replay`` is the command that examines them."""
    lines = []
    for member in members:
        num = len({skipped.step for skipped in skipped_of(run.member(member))})
        if num:
            steps = "1 step" if num == 1 else f"{num} steps"
            lines.append(f"{member}: skipped {steps} without a finite gradient; see {replay} member={member}")
    return lines


def _figure(value: float | None, form: str) -> str:
    # Keeps a diverged loss as narrow as the others.
    return "–" if value is None else format(value, form if abs(value) < 1e5 else ".2g")
