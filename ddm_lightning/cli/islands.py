"""Commands of islands: start members on them, and show their progress."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import LAUNCHERS
from ddm_lightning.islands.launch import build_launcher, cancel, jobs_of, launch
from ddm_lightning.islands.shared import pull_manifest
from ddm_lightning.islands.status import statuses
from ddm_lightning.members.roles import parse_members
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import status_table
from ddm_lightning.training.guard import skipped_of

_WATCH_SECONDS = 5.0


def launch_members(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``launch``: start the jobs of members, print them, or stop them."""
    run, members = Run(experiment), parse_members(options.only, experiment, "--only")
    jobs = jobs_of(run, members, options.config, options.overrides)
    if options.cancel:
        found = cancel(run, members)
    else:
        if options.on is None:
            raise UserError(f"launch: --on is missing; {LAUNCHERS.known()}")
        launcher = build_launcher(options.on, run)
        if options.dry_run:
            print(*map(launcher.describe, jobs), sep="\n")
            return
        pull_manifest(run)
        found = launch(run, jobs, launcher, options.on)
    for one in found:
        print(f"{one.member}: {one.action}" + (f" ({one.detail})" if one.detail else ""))
    print(f"next: {command_line('status', options)}")


def show_status(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``status``: print the table once, again and again, or as JSON."""
    run = Run(experiment) if experiment.remote else Run.open(experiment)
    if options.json:
        for status in statuses(run):
            print(json.dumps({**asdict(status), "shown_state": status.shown_state()}))
        return
    if options.watch:
        with Live(status_of(run), auto_refresh=False) as live:
            while any(status.state != "done" for status in statuses(run)):
                time.sleep(_WATCH_SECONDS)
                live.update(status_of(run), refresh=True)
        return
    Console().print(status_of(run))
    print_skipped(run.started, run, options)
    print(f"curves: tensorboard --logdir {run.folder.root}")


def print_skipped(members: Sequence[str], run: Run, options: argparse.Namespace) -> None:
    """Print how many steps each member has skipped, and how to look at them."""
    for member in members:
        if num := len({skipped.step for skipped in skipped_of(run.folder.member(member))}):
            steps = "1 step" if num == 1 else f"{num} steps"
            print(
                f"{member}: skipped {steps} without a finite gradient; "
                f"see {command_line('replay', options)} member={member}"
            )


def status_of(run: Run) -> Table:
    """Table of the run's members, on all islands if it has a URL."""
    return status_table(remote.shown(run.url or str(run.folder.root)), statuses(run))


def command_line(name: str, options: argparse.Namespace) -> str:
    """Command line for the user to type next, with the file and overrides of this one."""
    return shlex.join(["python", "-m", "ddm_lightning", name, "-c", options.config, *options.overrides])
