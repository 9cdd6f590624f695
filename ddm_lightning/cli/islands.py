"""Commands of islands: plan them, and start members on them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from rich.console import Console

from ddm_lightning.cli.status import command_line
from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.checks import check_positive
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.formatting import Bars
from ddm_lightning.core.registry import LAUNCHERS
from ddm_lightning.islands import plan, plan_tables
from ddm_lightning.islands.launch import build_launcher, cancel, jobs_of, launch
from ddm_lightning.islands.plan_data import data_of
from ddm_lightning.islands.shared import pull_manifest
from ddm_lightning.members.roles import parse_members
from ddm_lightning.members.run import Run


def launch_command(experiment: Experiment, options: argparse.Namespace) -> None:
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


def plan_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``plan``: print what each member needs on each device, the cheapest that fits in detail."""
    check_positive("--samples", options.samples)
    members = parse_members(options.only, experiment, "--only")
    rates = plan.rates_of(options.mfu, options.prices or ())
    devices, source = plan.devices_of(experiment, options.device, rates)
    data = data_of(experiment, options.samples)
    with Bars() as bars:
        planner = plan.Planner(experiment, members, data, rates, bars)
        plans = sorted(map(planner.on, devices), key=_by_price)
        plans = [planner.with_suggestions(one) for one in plans]

    sources = plan_tables.sources_of(data, rates, source, plans)
    warnings = [line for one in plans for line in one.warnings()]
    if options.json:
        found = {
            "experiment": experiment.name,
            "sources": sources,
            "warnings": warnings,
            "plans": [plan_tables.as_json(one) for one in plans],
        }
        print(json.dumps(found))
        return

    tables = plan_tables.tables(plans[0])
    if len(plans) > 1:
        tables.append(plan_tables.comparison(plans))

    Console().print(*tables)
    for title, lines in {
        "settings that fit": [line for one in plans for line in one.suggestions()],
        "sources": [f"{name}: {text}" for name, text in sources.items()],
        "warnings": warnings,
    }.items():
        if lines:
            print(f"{title}:", *lines, sep="\n  ")


def _by_price(one: plan.Plan) -> tuple[bool, bool, float]:
    """Sort plans that fit first, then by price, known ones first."""
    dollars = one.totals["dollars"]
    return not one.fits, dollars is None, dollars or 0.0
