"""Find a command's function, and import no more than it needs."""

from __future__ import annotations

import argparse
from importlib import import_module

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.environment import check_meeting, leave_ranks

COMMANDS = {
    **dict.fromkeys(("prepare", "fit", "evaluate", "diagnose", "replay", "ema"), "commands"),
    **dict.fromkeys(("sample", "demo", "export"), "sampling"),
    **dict.fromkeys(("launch", "plan"), "islands"),
    "status": "status",
}
"""Module of every command but ``config``, which needs none, and ``ensemble``, which needs no experiment."""


def run_command(experiment: Experiment, options: argparse.Namespace) -> int:
    """Run a command with as many threads as a member has; more threads than idle cores slow it down."""
    if options.command not in ("fit", "evaluate"):
        leave_ranks()

    check_meeting()
    module = import_module(f"ddm_lightning.cli.{COMMANDS[options.command]}")
    if options.command != "status":  # which computes nothing
        from ddm_lightning.core.devices import configure_torch

        configure_torch(experiment.island.accelerator, experiment.island.num_threads)

    return getattr(module, f"{options.command}_command")(experiment, options) or 0
