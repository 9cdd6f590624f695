"""The command line: its parser, and what every command ends with. ``--help`` imports neither torch nor Lightning."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from ddm_lightning import __version__
from ddm_lightning.cli.commands import COMMANDS, INTERRUPTED
from ddm_lightning.core.errors import UserError, line_of
from ddm_lightning.core.registry import STRATEGIES

_EXAMPLES = """\
from pictures to an ensemble, on this machine:
  python -m ddm_lightning fit -c experiments/emoji_4x.yaml
  python -m ddm_lightning sample -c experiments/emoji_4x.yaml --prompt "red apple" --num 8
one member alone, as on an island of its own (needs the prepared shards):
  python -m ddm_lightning fit -c experiments/emoji_4x.yaml member=expert-2 island.shards=/data/shards
"""


class _Describe(argparse.Action):
    """Prints the schema and exits, as ``--help`` does: no experiment file is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ddm_lightning.config import Experiment
        from ddm_lightning.core.schema import describe

        print("\n".join(describe(Experiment())))
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="ddm_lightning",
        description="Train decentralized diffusion models: K experts and a router, each alone on its island.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ddm_lightning {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("-c", "--config", required=True, metavar="FILE", help="experiment file (see experiments/)")
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="settings that win over the file: island.devices=8",
        )
        return command

    prepare = add("prepare", "Cluster the data set and write one folder of shards a cluster.")
    mode = prepare.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="print stages, samples, bytes and hours; write nothing")
    mode.add_argument("--prune", action="store_true", help="remove encoded parts that the source no longer lists")
    fit = add("fit", "Train the members (member=expert-3 or member=all, the default) and assemble the ensemble.")
    fit.add_argument("--jobs", type=int, default=None, help="members trained at once (default: what fits here)")
    sample = add("sample", "Draw pictures from the ensemble.")
    sample.add_argument("--prompt", action="append", default=None, help="what to draw; may be repeated, a row each")
    sample.add_argument(
        "--class",
        dest="classes",
        action="append",
        default=None,
        metavar="NAME",
        help="name or number of a class to draw; may be repeated, a row each",
    )
    sample.add_argument("--strategy", default=None, help=f"routing: {', '.join(STRATEGIES.names())}")
    sample.add_argument("--num", type=int, default=None, help="pictures a row")
    sample.add_argument("--seed", type=int, default=None, help="seed of the noise (default: the experiment's)")
    sample.add_argument(
        "--out",
        default=None,
        metavar="PATH",
        help="PNG file for the grid, or folder for new ones (default: the run's); single images go into a folder "
        "beside the grid, named after it",
    )
    replay = add(
        "replay", "Take a step of member=expert-3 once more that was left out because its gradient was not finite."
    )
    replay.add_argument("--step", type=int, default=None, help="which one (default: the last that was left out)")
    replay.add_argument("--rank", type=int, default=0, help="whose samples, if several devices train the member")
    ema = add("ema", "Compare widths of the average of a finished member's weights (member=expert-3) by held-out loss.")
    ema.add_argument("--width", action="append", type=float, default=None, help="one to compare; may be repeated")
    ema.add_argument(
        "--use", default=None, metavar="WIDTH", help="hand over the average of this width; original takes that back"
    )
    add("status", "Show how far each member is.")
    config = add("config", "Print the experiment with every default and override resolved.")
    config.add_argument("--describe", action=_Describe, nargs=0, help="print every key's type, default and meaning")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 1 when a member failed, 2 on bad input, 130 after Ctrl-C.
    """
    options = _parse(arguments)
    try:
        return COMMANDS[options.command](options)
    except BrokenPipeError:
        # Who reads, such as head, has enough; Python would say at its end that it could not write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        line = line_of(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return INTERRUPTED


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    options, rest = parser.parse_known_args(arguments)
    # argparse takes one run of positionals; overrides may also stand between and behind options.
    strays = [text for text in rest if text.startswith("-") or "=" not in text]
    if strays:
        parser.error(f"unrecognized arguments: {' '.join(strays)}; settings are given as key=value")
    options.overrides = [*options.overrides, *rest]
    return options
