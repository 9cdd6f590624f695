"""Parse the command line, run a command, and turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from ddm_lightning import __version__
from ddm_lightning.core import environment
from ddm_lightning.core.errors import UserError, hide_passwords, line_of
from ddm_lightning.core.processes import STOPPED, stop_as_by_ctrl_c
from ddm_lightning.core.registry import LAUNCHERS, STRATEGIES

_EXAMPLES = """\
from images to an ensemble, on this machine:
  python -m ddm_lightning fit -c experiments/emoji_4x.yaml
  python -m ddm_lightning sample -c experiments/emoji_4x.yaml --prompt "red apple" --num 8
on islands that share nothing but an address:
  python -m ddm_lightning prepare -c experiments/emoji_4x.yaml remote=s3://bucket/emoji_4x
  python -m ddm_lightning launch -c experiments/emoji_4x.yaml remote=s3://bucket/emoji_4x --on slurm
completion by Tab of the short name ddm-lightning (extra [completion]):
  eval "$(register-python-argcomplete ddm-lightning)"
"""


_RESUMABLE = ("prepare", "fit", "evaluate")
_PLACE = "experiment file (see experiments/)"
_PLACES = {
    **dict.fromkeys(
        ("sample", "demo", "evaluate", "export"), f"{_PLACE}, or folder or URL of a run or of a saved ensemble"
    ),
    **dict.fromkeys(("diagnose", "replay", "ema", "status"), f"{_PLACE}, or run folder"),
}
"""Help of ``--config`` where it takes more than a file."""
_Options: TypeAlias = dict[str, dict[str, Any]]
"""Arguments of ``add_argument`` by the name of the option."""


class _Describe(argparse.Action):
    """Print the schema and exit, as ``--help`` does: no experiment file is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ddm_lightning.config.load import describe

        for key, form, text in describe():
            print(f"{key}:{form}\n    {text}")

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
    for name, (text, options) in _commands().items():
        command = commands.add_parser(name, help=text, description=text)
        if name == "ensemble":
            actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
            for action, (words, own) in _changes().items():
                _add(actions.add_parser(action, help=words, description=words), own)

            continue

        command.add_argument("-c", "--config", required=True, metavar="FILE", help=_PLACES.get(name, _PLACE))
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="settings that override the file, such as sample.num_steps=20",
        )
        _add(command.add_mutually_exclusive_group() if name in ("prepare", "ema", "status") else command, options)

    return parser


def _add(command: argparse._ActionsContainer, options: _Options) -> None:
    for name, settings in options.items():
        command.add_argument(name, **settings)


def _commands() -> dict[str, tuple[str, _Options]]:
    """Description and options of each command."""
    allow_paths = {
        "--allow-paths": _option(
            "let encoders load local paths or hub models that only the ensemble's files name", action="store_true"
        )
    }
    return {
        "prepare": (
            "Cluster the data set and write one folder of shards per cluster.",
            {
                "--dry-run": _option("print stages, samples, bytes and hours; write nothing", action="store_true"),
                "--prune": _option("remove encoded parts that the source no longer lists", action="store_true"),
                "--parts": _option(
                    "prepare as machine I of N; run it on each machine with the same remote",
                    metavar="I/N",
                ),
            },
        ),
        "fit": (
            "Train the members (member=all by default, or names such as member=expert-3) and assemble them.",
            {"--jobs": _option("members trained at once (default: as many as fit this machine)", type=int)},
        ),
        "sample": (
            "Generate images with the ensemble.",
            {
                "--prompt": _option("text prompt; repeat it for more rows", action="append"),
                "--class": _option(
                    "class name or number; repeat it for more rows", dest="classes", action="append", metavar="NAME"
                ),
                "--strategy": _option(f"routing: {', '.join(STRATEGIES.names())}"),
                "--num": _option("images per row (default: the experiment's)", type=int),
                "--seed": _option("noise seed (default: the experiment's)", type=int),
                "--out": _option(
                    "PNG file for the grid, or folder for a new one (default: the run's samples folder); single images "
                    "go into a folder beside the grid, with the same name",
                    metavar="PATH",
                ),
                "--captions": _option(
                    "print the captions that contain WORD, to use as prompts; '' for all", metavar="WORD"
                ),
                "--gif": _option("also write the sampling trajectory as a GIF", action="store_true"),
                **allow_paths,
            },
        ),
        "demo": (
            "Try the ensemble on a local page (extra [page]).",
            {
                "--host": _option("address to listen on (default: this machine only)", default="127.0.0.1"),
                "--port": _option("port (default: 7860; 0 for any free one)", type=int, default=7860),
                **allow_paths,
            },
        ),
        "evaluate": (
            "Score the ensemble's samples against held-out images (resumable; minutes on a CPU).",
            {
                "--images": _option("folder or .npz file to score instead of new samples", metavar="PATH"),
                "--out": _option("results folder (default: one in the run's evaluation/)", metavar="FOLDER"),
                **allow_paths,
            },
        ),
        "diagnose": (
            "Measure experts by cluster, the router by noise level and the clusters' shares in samples; takes minutes.",
            {
                "--strategy": _option("strategy whose samples are classified; repeat for more", action="append"),
                "--num": _option("images per strategy (default: 256)", type=int, default=256),
            },
        ),
        "replay": (
            "Repeat a step of member=expert-3 that was skipped because its gradient was not finite.",
            {
                "--step": _option("number of the step (default: the last skipped one)", type=int),
                "--rank": _option("rank whose samples are replayed (default: 0)", type=int, default=0),
            },
        ),
        "ema": (
            "Compare EMA widths of a finished member (member=expert-3) by held-out loss.",
            {
                "--width": _option("width to compare; repeat it for more", action="append", type=float),
                "--use": _option("put this width's average into the artifact; original undoes it", metavar="WIDTH"),
            },
        ),
        "export": (
            "Write the ensemble as a folder for others: artifacts, hashes and a model card.",
            {
                "--to": _option(
                    "diffusers adds its pipeline, or with sample.member=NAME writes that member's own transformer; "
                    "peft writes only the experts' adapters, for peft",
                    required=True,
                    choices=("ensemble", "diffusers", "peft"),
                ),
                "--out": _option("new folder", required=True, metavar="FOLDER"),
                "--licence": _option("licence of the weights, for the model card", metavar="TEXT"),
            },
        ),
        "ensemble": ("Add, remove or replace an expert; writes a new ensemble.", {}),
        "launch": (
            "Start each member on an island of its own, unless it runs or is finished.",
            {
                "--on": _option(f"launcher: {', '.join(LAUNCHERS.names())}", metavar="NAME"),
                "--only": _option("members, such as expert-0,router (default: all of the ensemble)", default="all"),
                "--cancel": _option("stop the members; all but sky wait for a checkpoint", action="store_true"),
                "--dry-run": _option("print the jobs; start nothing", action="store_true"),
            },
        ),
        "plan": (
            "Show what each member needs before you rent anything: memory, hours, traffic and price.",
            {
                "--device": _option("GPU, such as 'A100 80GB'; repeat it to compare", action="append", metavar="NAME"),
                "--prices": _option("YAML file of dollars per hour by GPU", action="append", metavar="FILE"),
                "--mfu": _option("share of the GPU's peak, or a result of benchmarks/mfu.py", metavar="SHARE|FILE"),
                "--samples": _option("images of the source, if they are not prepared", type=int, metavar="N"),
                "--only": _option("members, such as expert-0,router (default: all of the ensemble)", default="all"),
                "--json": _option("print one JSON object instead", action="store_true"),
            },
        ),
        "status": (
            "Show the progress of each member, on all islands if the experiment has a remote.",
            {
                "--watch": _option("refresh every few seconds until all members are done", action="store_true"),
                "--json": _option("print one JSON object per member instead", action="store_true"),
                "--html": _option("write a page with the table and all curves instead", metavar="FILE"),
            },
        ),
        "config": (
            "Print the experiment with all defaults and overrides resolved.",
            {"--describe": _option("print every key's type, default and meaning", action=_Describe, nargs=0)},
        ),
    }


def _changes() -> dict[str, tuple[str, _Options]]:
    """Description and arguments of each action of ``ensemble``."""
    folder = {"folder": _option("run folder, saved ensemble, or URL of one", metavar="FOLDER")}
    member = {"member": _option("name of the expert, such as expert-2", metavar="EXPERT")}
    artifact = {"artifact": _option("artifact folder of the new expert", metavar="ARTIFACT")}
    images = _option("images in its cluster, for its prior", type=int, metavar="N")
    trust = _option("public key that must have signed ARTIFACT; repeat it for more", action="append", metavar="KEY")
    out = {"--out": _option("new folder, a saved ensemble", required=True, metavar="OUT")}
    tune = "train the router on the new cluster, too: run folders with the old clusters' shards and with the new one's"
    return {
        "add": (
            "Add an expert; one of other data needs the strategy bayes, or --tune-router.",
            {
                **folder,
                **artifact,
                "--images": {**images, "required": True},
                "--tune-router": _option(tune, nargs=2, metavar=("RUN", "NEW_RUN")),
                "--trust": trust,
                **out,
            },
        ),
        "remove": (
            "Remove an expert; the router's probabilities of the others are renormalised.",
            {**folder, **member, **out},
        ),
        "replace": (
            "Put another artifact in the place of an expert.",
            {**folder, **member, **artifact, "--images": images, "--trust": trust, **out},
        ),
    }


def _option(help_text: str, **settings: Any) -> dict[str, Any]:
    """Arguments of ``add_argument``."""
    return {"help": help_text, **settings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 1 when a member failed, 2 on bad input or a full disk, 130 after Ctrl-C.
    """
    options = argparse.Namespace(command="")
    try:
        environment.enter()
        options = _parse(arguments)
        return _run(options)
    except BrokenPipeError:
        # The reader, such as head, has closed the pipe. Python would complain at exit that it cannot write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        if (line := line_of(error)) is None:
            raise

        print(f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if options.command in _RESUMABLE:
            remedy = "; run the same command again to resume"
        else:
            remedy = ""

        print(f"interrupted{remedy}", file=sys.stderr)
        return STOPPED


def _run(options: argparse.Namespace) -> int:
    """Load the experiment and call the command. ``prepare`` and ``fit`` refuse a bad file before torch is imported."""
    if options.command == "ensemble":
        from ddm_lightning.cli.commands import change_ensemble

        change_ensemble(options)
        return 0

    from ddm_lightning.config.load import load_experiment, to_yaml

    if options.command in ("fit", "replay", "ema"):
        chosen = []
        for text in options.overrides:
            if text.startswith("member="):
                chosen.append(text)

        if chosen:
            options.member = chosen[-1].removeprefix("member=")
        else:
            options.member = "all"

        options.overrides = [text for text in options.overrides if text not in chosen]

    if options.command == "fit" and options.member != "all":
        stop_as_by_ctrl_c()
    if getattr(options, "out", options.config) is None and "://" in options.config:
        raise UserError(f"{options.config}: a URL cannot hold results; add --out FOLDER")

    if options.command in ("config", "prepare", "fit", "launch", "plan"):  # they may make the run
        experiment = load_experiment(options.config, options.overrides)
    else:
        from ddm_lightning.use.saved import load_settings

        experiment = load_settings(
            options.config,
            options.overrides,
            allow_paths=getattr(options, "allow_paths", True),  # commands without the option use no encoder
        )

    if options.command == "config":
        print(to_yaml(experiment), end="")
        return 0

    from ddm_lightning.cli.commands import run_command

    return run_command(experiment, options)


def _at_home(word: str) -> str:
    """A word with its ``~`` expanded: a shell does not in ``--out=~/images``, other programs never do."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + os.path.expanduser(value)  # noqa: PTH111 (pathlib would change URLs)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)

    arguments = [_at_home(hide_passwords(text)) for text in (sys.argv[1:] if arguments is None else arguments)]
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)

    options, rest = parser.parse_known_args(arguments)
    # argparse takes positionals from one place only; overrides may also stand between and after options.
    is_fixed = options.command == "ensemble"
    if strays := [text for text in rest if is_fixed or text.startswith("-") or "=" not in text]:
        parser.error(f"unrecognized arguments: {' '.join(strays)}; settings are given as key=value")

    options.overrides = [*getattr(options, "overrides", ()), *rest]
    return options
