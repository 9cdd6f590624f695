"""Commands of islands: start members on them, and show their progress."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.checks import check_positive
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.registry import LAUNCHERS
from ddm_lightning.islands import plan, plan_tables
from ddm_lightning.islands.launch import build_launcher, cancel, jobs_of, launch
from ddm_lightning.islands.plan_data import data_of
from ddm_lightning.islands.shared import pull_manifest
from ddm_lightning.islands.status import NOTES, Seen, Status, Watch, open_to_watch
from ddm_lightning.members.member import parse_members
from ddm_lightning.members.run import Run
from ddm_lightning.training.guard import skipped_of

_WATCH_SECONDS = 5.0
# Width of the table of islands in a pipe, which cuts no line.
_SHARED_WIDTH = 1000


def launch_members(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``launch``: start the jobs of members, print them, or stop them."""
    run = Run(experiment)
    members = parse_members(options.only, experiment, "--only")
    jobs = jobs_of(run, members, options.config, options.overrides)
    if options.cancel:
        found: Iterable[tuple[str, str]] = cancel(run, members)
    else:
        if options.on is None:
            raise UserError(f"launch: --on is missing; {LAUNCHERS.known()}")

        launcher = build_launcher(options.on, run, jobs)
        for warning in plan.shortages(experiment, members, launcher.devices):
            note(warning)

        if options.dry_run:
            print(launcher.describe_all(jobs))
            return

        pull_manifest(run)
        found = launch(run, jobs, launcher, options.on).items()

    for member, done in found:
        print(f"{member}: {done}")

    print(f"next: {command_line('status', options)}")


def show_plan(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``plan``: print what each member needs on each device, the cheapest that fits in detail."""
    check_positive("--samples", options.samples)
    members = parse_members(options.only, experiment, "--only")
    rates = plan.rates_of(options.mfu, options.prices or ())
    devices, source = plan.devices_of(experiment, options.device, rates)
    data = data_of(experiment, options.samples)
    planner = plan.Planner(experiment, members, data, rates)
    plans = sorted(map(planner.on, devices), key=_by_price)
    plans = [planner.with_suggestions(one) for one in plans]
    best = plans[0]
    sources = plan_tables.sources_of(data, rates, source, plans)
    warnings = [*best.warnings()]
    if options.json:
        found = {
            "experiment": experiment.name,
            "sources": sources,
            "warnings": warnings,
            "plans": [plan_tables.as_json(one) for one in plans],
        }
        print(json.dumps(found))
        return

    tables = plan_tables.tables(best)
    if len(plans) > 1:
        tables.append(plan_tables.comparison(plans))

    Console().print(*tables)
    for title, lines in {
        "smallest changes that fit": [line for one in plans for line in plan_tables.suggestions(one)],
        "sources": [f"{name}: {text}" for name, text in sources.items()],
        "warnings": warnings,
    }.items():
        if lines:
            print(f"{title}:", *lines, sep="\n  ")


def _by_price(one: plan.Plan) -> tuple[bool, bool, float]:
    """Sort plans that fit first, then by price, known ones first."""
    dollars = one.totals["dollars"]
    return not one.fits, dollars is None, dollars or 0.0


def show_status(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``status``: print the table once, repeatedly or as JSON, or write it as a page."""
    run = open_to_watch(experiment)
    if options.watch:
        _watch(run)
        return

    members = Watch(run).look()
    if options.json:
        for seen in members:
            print(json.dumps(seen.to_json()))

        return

    if options.html:
        from ddm_lightning.islands.page import write_page

        write_page(Path(options.html), members, run)
        print(f"status: {options.html}")
        return

    console = Console()
    if run.url and not console.is_terminal:
        console.width = max(console.width, _SHARED_WIDTH)

    console.print(Status(run, members))
    states = {seen.health for seen in members}
    for state, meaning in NOTES.items():
        if state in states:
            print(f"{state}: {meaning}")

    print_skipped(run.started, run, options)
    print("curves: add --html FILE" if run.url else f"curves: tensorboard --logdir {run.folder.root}")


def _watch(run: Run) -> None:
    """Show the table until all members are done; wait for a store that cannot be reached."""
    watch = Watch(run)
    is_waiting = False
    members: list[Seen] = []
    with Live(auto_refresh=False) as live:
        while True:
            try:
                members = watch.look()
                live.update(Status(run, members), refresh=True)
                if all(seen.health == "done" for seen in members):
                    return

                is_waiting = False
            except UserError as error:
                if not members and not isinstance(error.__cause__, ConnectionError):
                    raise
                if not is_waiting:
                    note(f"{error}; tried again until it answers")

                is_waiting = True

            time.sleep(_WATCH_SECONDS)


def print_skipped(members: Sequence[str], run: Run, options: argparse.Namespace) -> None:
    """Print how many steps each member has skipped, and how to look at them."""
    for member in members:
        num = len({skipped.step for skipped in skipped_of(run.folder.member(member))})
        if num:
            steps = "1 step" if num == 1 else f"{num} steps"
            replay = f"{command_line('replay', options)} member={member}"
            print(f"{member}: skipped {steps} without a finite gradient; see {replay}")


def command_line(name: str, options: argparse.Namespace) -> str:
    """Command line for the user to type next, with the file and overrides of this one."""
    return shlex.join(["python", "-m", "ddm_lightning", name, "-c", options.config, *options.overrides])
