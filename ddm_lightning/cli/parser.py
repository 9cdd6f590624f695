"""Parse the command line, run a command, and turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddm_lightning import __version__
from ddm_lightning.core.errors import UserError, line_of
from ddm_lightning.core.processes import STOPPED, stop_as_by_ctrl_c
from ddm_lightning.core.registry import STRATEGIES

_EXAMPLES = """\
from images to an ensemble, on this machine:
  python -m ddm_lightning fit -c experiments/emoji_4x.yaml
  python -m ddm_lightning sample -c experiments/emoji_4x.yaml --prompt "red apple" --num 8
one member alone, as on an island (needs the prepared shards):
  python -m ddm_lightning fit -c experiments/emoji_4x.yaml member=expert-2 island.shards=/data/shards
completion by Tab of the short name ddm-lightning (extra [completion]):
  eval "$(register-python-argcomplete ddm-lightning)"
"""


_RESUMABLE = ("prepare", "fit", "evaluate")


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

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        places = "experiment file (see experiments/)"
        if name in ("sample", "demo", "evaluate", "export"):
            places += ", or folder or URL of a run or of a saved ensemble"
        elif name in ("diagnose", "replay", "ema", "status"):
            places += ", or run folder"
        command.add_argument("-c", "--config", required=True, metavar="FILE", help=places)
        overrides = "settings that override the file, such as sample.num_steps=20"
        command.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)
        return command

    prepare = add("prepare", "Cluster the data set and write one folder of shards per cluster.")
    mode = prepare.add_mutually_exclusive_group()
    mode.add_argument("--dry-run", action="store_true", help="print stages, samples, bytes and hours; write nothing")
    mode.add_argument("--prune", action="store_true", help="remove encoded parts that the source no longer lists")
    fit = add("fit", "Train the members (member=all by default, or names such as member=expert-3) and assemble them.")
    fit.add_argument("--jobs", type=int, help="members trained at once (default: as many as fit this machine)")
    sample = add("sample", "Generate images with the ensemble.")
    sample.add_argument("--prompt", action="append", help="text prompt; repeat it for more rows")
    text = "class name or number; repeat it for more rows"
    sample.add_argument("--class", dest="classes", action="append", metavar="NAME", help=text)
    sample.add_argument("--strategy", help=f"routing: {', '.join(STRATEGIES.names())}")
    sample.add_argument("--num", type=int, help="images per row (default: the experiment's)")
    sample.add_argument("--seed", type=int, help="noise seed (default: the experiment's)")
    text = "PNG file for the grid, or folder for a new one (default: the run's samples folder)"
    text += "; single images go into a folder beside the grid, with the same name"
    sample.add_argument("--out", metavar="PATH", help=text)
    sample.add_argument(
        "--captions", metavar="WORD", help="print the captions that contain WORD, to use as prompts; '' for all"
    )
    sample.add_argument("--gif", action="store_true", help="also write the sampling trajectory as a GIF")
    demo = add("demo", "Try the ensemble on a local page (extra [page]).")
    demo.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    demo.add_argument("--port", type=int, default=7860, help="port (default: 7860; 0 for any free one)")
    evaluate = add("evaluate", "Score the ensemble's samples against held-out images (resumable; minutes on a CPU).")
    evaluate.add_argument("--images", metavar="PATH", help="folder or .npz file to score instead of new samples")
    evaluate.add_argument("--out", metavar="FOLDER", help="results folder (default: one in the run's evaluation/)")
    text = "let encoders load local paths or hub models that only the ensemble's files name"
    for command in (sample, demo, evaluate):
        command.add_argument("--allow-paths", action="store_true", help=text)
    text = "Measure experts by cluster, the router by time and the clusters' shares among samples (minutes on a CPU)."
    diagnose = add("diagnose", text)
    diagnose.add_argument("--strategy", action="append", help="strategy whose samples are classified; repeat for more")
    diagnose.add_argument("--num", type=int, default=256, help="images per strategy (default: 256)")
    replay = add("replay", "Repeat a step of member=expert-3 that was skipped because its gradient was not finite.")
    replay.add_argument("--step", type=int, help="number of the step (default: the last skipped one)")
    replay.add_argument("--rank", type=int, default=0, help="rank whose samples are replayed (default: 0)")
    ema = add("ema", "Compare EMA widths of a finished member (member=expert-3) by held-out loss.")
    ema.add_argument("--width", action="append", type=float, help="width to compare; repeat it for more")
    ema.add_argument("--use", metavar="WIDTH", help="put this width's average into the artifact; original undoes it")
    export = add("export", "Write the ensemble as a folder for others: artifacts, hashes and a model card.")
    export.add_argument("--to", required=True, choices=("ensemble", "diffusers"), help="diffusers adds its pipeline")
    export.add_argument("--out", required=True, metavar="FOLDER", help="new folder")
    export.add_argument("--licence", metavar="TEXT", help="licence of the weights, for the model card")
    _add_changes(commands)
    add("status", "Show the progress of each member.")
    config = add("config", "Print the experiment with all defaults and overrides resolved.")
    config.add_argument("--describe", action=_Describe, nargs=0, help="print every key's type, default and meaning")
    return parser


def _add_changes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Write an ensemble with other experts, without training."
    changes = commands.add_parser("ensemble", help=text, description=text)
    actions = changes.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, words in {
        "add": "Add an expert; one of other data needs the strategy bayes, or --tune-router.",
        "remove": "Remove an expert; the router's probabilities of the others are renormalised.",
        "replace": "Put another artifact in the place of an expert.",
    }.items():
        command = actions.add_parser(action, help=words, description=words)
        command.add_argument("folder", metavar="FOLDER", help="run folder, saved ensemble, or URL of one")
        if action != "add":
            command.add_argument("member", metavar="EXPERT", help="name of the expert, such as expert-2")
        if action != "remove":
            command.add_argument("artifact", metavar="ARTIFACT", help="artifact folder of the new expert")
            what = "images in its cluster, for its prior"
            command.add_argument("--images", type=int, required=action == "add", metavar="N", help=what)
        if action == "add":
            what = "extend the router: run folders with the shards of its own clusters, and with those of the new one"
            command.add_argument("--tune-router", nargs=2, metavar=("RUN", "NEW_RUN"), help=what)
        command.add_argument("--out", required=True, metavar="OUT", help="new folder, a saved ensemble")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 1 when a member failed, 2 on bad input or a full disk, 130 after Ctrl-C.
    """
    options = argparse.Namespace(command="")
    try:
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
        remedy = "; run the same command again to resume" if options.command in _RESUMABLE else ""
        print(f"interrupted{remedy}", file=sys.stderr)
        return STOPPED


def _run(options: argparse.Namespace) -> int:
    """Load the experiment and call the command. A bad file is refused before torch is imported."""
    if options.command in ("ensemble", "demo"):
        from ddm_lightning.cli.commands import change_ensemble, demo

        return change_ensemble(options) if options.command == "ensemble" else demo(options)
    from ddm_lightning.config.load import load_experiment, to_yaml
    from ddm_lightning.members.run_folder import load_run

    if options.command in ("fit", "replay", "ema"):
        chosen = [text for text in options.overrides if text.startswith("member=")]
        options.member = chosen[-1].removeprefix("member=") if chosen else "all"
        options.overrides = [text for text in options.overrides if text not in chosen]
    if options.command == "fit" and options.member != "all":
        stop_as_by_ctrl_c()
    makes_run = options.command in ("config", "prepare", "fit")
    if not makes_run and (record := Path(options.config, "experiment.yaml")).exists():
        options.config = str(record)
    if not makes_run and ("://" in options.config or Path(options.config).is_dir()):
        from ddm_lightning.use.pretrained import load_saved

        if getattr(options, "out", options.config) is None and "://" in options.config:
            raise UserError(f"{options.config}: a URL cannot hold results; add --out FOLDER")
        # Commands without the option use no encoder.
        experiment = load_saved(options.config, options.overrides, getattr(options, "allow_paths", True))
    else:
        # The other commands need a run, and its record replaces the overrides it was made with.
        experiment = (load_experiment if makes_run else load_run)(options.config, options.overrides)
    if options.command == "config":
        print(to_yaml(experiment), end="")
        return 0

    from ddm_lightning.cli.commands import run_command

    return run_command(experiment, options)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    options, rest = parser.parse_known_args(arguments)
    # argparse takes positionals from one place only; overrides may also stand between and after options.
    is_fixed = options.command == "ensemble"
    if strays := [text for text in rest if is_fixed or text.startswith("-") or "=" not in text]:
        parser.error(f"unrecognized arguments: {' '.join(strays)}; settings are given as key=value")
    options.overrides = [*getattr(options, "overrides", ()), *rest]
    return options
