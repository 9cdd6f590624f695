"""The command ``status``; nothing that it imports needs torch."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.islands.status import NOTES, Seen, Status, Watch, open_to_watch
from ddm_lightning.members.run import Run
from ddm_lightning.members.skipped import skipped_of

_WATCH_SECONDS = 5.0
# Width of the table of islands in a pipe, which cuts no line.
_SHARED_WIDTH = 1000


def status_command(experiment: Experiment, options: argparse.Namespace) -> None:
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
