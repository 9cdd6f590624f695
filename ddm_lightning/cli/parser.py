"""Parse the command line, run a command, and turn errors into one line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddm_lightning import __version__
from ddm_lightning.core import environment
from ddm_lightning.core.errors import UserError, hide_passwords, line_of, say
from ddm_lightning.core.processes import STOPPED, stop_as_by_ctrl_c
from ddm_lightning.core.registry import LAUNCHERS, STRATEGIES

_EXAMPLES = """\
from images to an ensemble, on this machine:
  python -m ddm_lightning init emoji_4x
  python -m ddm_lightning fit -c emoji_4x.yaml
  python -m ddm_lightning sample -c emoji_4x.yaml --prompt "red apple" --num 8
on islands that share nothing but an address:
  python -m ddm_lightning prepare -c emoji_4x.yaml remote=s3://bucket/emoji_4x
  python -m ddm_lightning launch -c emoji_4x.yaml remote=s3://bucket/emoji_4x --on slurm
completion by Tab of the short name ddm-lightning (extra [completion]):
  eval "$(register-python-argcomplete ddm-lightning)"
"""


_RESUMABLE = ("prepare", "fit", "evaluate")
_PLACE = "experiment file (init writes one)"
_PLACES = {
    **dict.fromkeys(
        ("sample", "demo", "evaluate", "export"), f"{_PLACE}, or folder or URL of a run or of a saved ensemble"
    ),
    **dict.fromkeys(("diagnose", "replay", "ema", "status"), f"{_PLACE}, or run folder"),
}
"""Help of ``--config`` where it takes more than a file."""


class _Describe(argparse.Action):
    """Print the schema and exit, as ``--help`` does: no experiment file is needed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ddm_lightning.config.load import describe

        for key, form, text in describe():
            print(f"{key}:{form}\n    {text}")

        parser.exit()


class _Version(argparse.Action):
    """Print versions and device, and exit; torch is imported for no other option."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import torch

        from ddm_lightning.core.devices import devices_named

        print(f"ddm_lightning {__version__}\ntorch {torch.__version__}")
        print(f"device: {devices_named('auto', torch.cuda.device_count())}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="ddm_lightning",
        description="Train decentralized diffusion models: K experts and a router, each alone on its island.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the versions of package and torch, and device"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_init(commands)

    def add(name: str, text: str, *, exclusive: bool = False) -> argparse._ActionsContainer:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("-c", "--config", required=True, metavar="FILE", help=_PLACES.get(name, _PLACE))
        command.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="settings that override the file, such as sample.num_steps=20",
        )
        if exclusive:
            return command.add_mutually_exclusive_group()

        return command

    prepare = add("prepare", "Cluster the data set and write one folder of shards per cluster.", exclusive=True)
    prepare.add_argument("--dry-run", action="store_true", help="print stages, samples, bytes and hours; write nothing")
    prepare.add_argument("--prune", action="store_true", help="remove encoded parts that the source no longer lists")
    prepare.add_argument(
        "--parts", metavar="I/N", help="prepare as machine I of N; run it on each machine with the same remote"
    )

    fit = add("fit", "Train the members (member=all by default, or names such as member=expert-3) and assemble them.")
    fit.add_argument("--jobs", type=int, help="members trained at once (default: as many as fit this machine)")

    sample = add("sample", "Generate images with the ensemble.")
    sample.add_argument("--prompt", action="append", help="text prompt; repeat it for more rows")
    sample.add_argument(
        "--class", dest="classes", action="append", metavar="NAME", help="class name or number; repeat it for more rows"
    )
    sample.add_argument("--negative-prompt", metavar="TEXT", help="what guidance leads away from, for all prompts")
    sample.add_argument("--image", type=Path, metavar="FILE", help="image to start from instead of noise, for all rows")
    sample.add_argument(
        "--strength", type=float, metavar="SHARE", help="share of the steps to run from the noisy image (default: 0.8)"
    )
    sample.add_argument(
        "--size",
        dest="sizes",
        action="append",
        metavar="HEIGHTxWIDTH",
        help="size of the images in pixels, such as 320x192 (default: the square); repeat it for more rows",
    )
    sample.add_argument(
        "--exact", action="store_true", default=None, help="take --size as it is, not the nearest trained shape"
    )
    sample.add_argument("--strategy", help=f"routing: {', '.join(STRATEGIES.names())}")
    sample.add_argument("--num", type=int, help="images per row (default: the experiment's)")
    sample.add_argument("--seed", type=int, help="noise seed (default: the experiment's)")
    sample.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="IMAGE.png",
        help="make an image or grid of this command again, as its PNG says; other options change it",
    )
    sample.add_argument(
        "--out",
        metavar="PATH",
        help="PNG file for the grid, or folder for a new one (default: the run's samples folder); single images "
        "go into a folder beside the grid, with the same name",
    )
    sample.add_argument(
        "--captions", metavar="WORD", help="print the captions that contain WORD, to use as prompts; '' for all"
    )
    sample.add_argument("--gif", action="store_true", help="also write the sampling trajectory as a GIF")

    demo = add("demo", "Try the ensemble on a local page (extra [page]).")
    demo.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    demo.add_argument("--port", type=int, default=7860, help="port (default: 7860; 0 for any free one)")

    evaluate = add("evaluate", "Score the ensemble's samples against held-out images (resumable; minutes on a CPU).")
    evaluate.add_argument(
        "--images", type=Path, metavar="PATH", help="folder or .npz file to score instead of new samples"
    )
    evaluate.add_argument(
        "--out", type=Path, metavar="FOLDER", help="results folder (default: one in the run's evaluation/)"
    )
    for command in (sample, demo, evaluate):
        command.add_argument(
            "--allow-paths",
            action="store_true",
            help="let encoders load local paths or hub models that only the ensemble's files name",
        )

    diagnose = add(
        "diagnose",
        "Measure experts by cluster, the router by noise level and the clusters' shares in samples; takes minutes.",
    )
    diagnose.add_argument("--strategy", action="append", help="strategy whose samples are classified; repeat for more")
    diagnose.add_argument("--num", type=int, default=256, help="images per strategy (default: 256)")

    replay = add("replay", "Repeat a step of member=expert-3 that was skipped because its gradient was not finite.")
    replay.add_argument("--step", type=int, help="number of the step (default: the last skipped one)")
    replay.add_argument("--rank", type=int, default=0, help="rank whose samples are replayed (default: 0)")

    ema = add("ema", "Compare EMA widths of a finished member (member=expert-3) by held-out loss.", exclusive=True)
    ema.add_argument("--width", action="append", type=float, help="width to compare; repeat it for more")
    ema.add_argument("--use", metavar="WIDTH", help="put this width's average into the artifact; original undoes it")

    export = add("export", "Write the ensemble as a folder for others: artifacts, hashes and a model card.")
    export.add_argument(
        "--to",
        required=True,
        choices=("ensemble", "diffusers", "peft"),
        help="diffusers adds its pipeline, or with sample.member=NAME writes that member's own transformer; "
        "peft writes only the experts' adapters, for peft and diffusers",
    )
    export.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder")
    export.add_argument("--licence", metavar="TEXT", help="licence of the weights, for the model card")

    _add_ensemble(commands)
    launch = add("launch", "Start each member on an island of its own, unless it runs or is finished.")
    launch.add_argument("--on", metavar="NAME", help=f"launcher: {', '.join(LAUNCHERS.names())}")
    launch.add_argument("--only", default="all", help="members, such as expert-0,router (default: all of the ensemble)")
    launch.add_argument("--cancel", action="store_true", help="stop the members; all but sky wait for a checkpoint")
    launch.add_argument("--dry-run", action="store_true", help="print the jobs; start nothing")

    plan = add("plan", "Show what each member needs before you rent anything: memory, hours, traffic and price.")
    plan.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="GPU, such as 'A100 80GB' or name=MyGPU,tflops=120,memory_gb=24 (dense peak in bfloat16); 'here' measures "
        "this machine; repeat it to compare",
    )
    plan.add_argument("--prices", action="append", metavar="FILE", help="YAML file of dollars per hour by GPU")
    plan.add_argument("--mfu", metavar="SHARE|FILE", help="share of the GPU's peak, or a result of benchmarks/mfu.py")
    plan.add_argument("--samples", type=int, metavar="N", help="images of the source, if they are not prepared")
    plan.add_argument("--only", default="all", help="members, such as expert-0,router (default: all of the ensemble)")
    plan.add_argument("--json", action="store_true", help="print one JSON object instead")

    status = add(
        "status", "Show the progress of each member, on all islands if the experiment has a remote.", exclusive=True
    )
    status.add_argument("--watch", action="store_true", help="refresh every few seconds until all members are done")
    status.add_argument("--json", action="store_true", help="print one JSON object per member instead")
    status.add_argument("--html", metavar="FILE", help="write a page with the table and all curves instead")

    config = add("config", "Print the experiment with all defaults and overrides resolved.")
    config.add_argument("--describe", action=_Describe, nargs=0, help="print every key's type, default and meaning")

    return parser


def _add_init(commands: Any) -> None:
    """Add ``init``, which takes the name of a shipped experiment."""
    text = "List the experiments that come with the package, or write one into a file of yours."
    init = commands.add_parser("init", help=text, description=text)
    init.add_argument(
        "name", nargs="?", metavar="NAME", help="experiment to write into this folder (default: list all)"
    )
    init.add_argument("--images", metavar="DIR", help="folder or URL of your images, for folder_4x")
    init.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: NAME.yaml in this folder)")


def _add_ensemble(commands: Any) -> None:
    """Add ``ensemble``, whose actions take no experiment."""
    text = "Add, remove or replace an expert; writes a new ensemble."
    ensemble = commands.add_parser("ensemble", help=text, description=text)
    actions = ensemble.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, text in {
        "add": "Add an expert; one of other data needs the strategy bayes, or --tune-router.",
        "remove": "Remove an expert; the router's probabilities of the others are renormalised.",
        "replace": "Put another artifact in the place of an expert.",
    }.items():
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("folder", metavar="FOLDER", help="run folder, saved ensemble, or URL of one")
        if name != "add":
            action.add_argument("member", metavar="EXPERT", help="name of the expert, such as expert-2")

        if name != "remove":
            action.add_argument("artifact", type=Path, metavar="ARTIFACT", help="artifact folder of the new expert")
            action.add_argument(
                "--images", type=int, required=name == "add", metavar="N", help="images in its cluster, for its prior"
            )

        if name == "add":
            action.add_argument(
                "--tune-router",
                type=Path,
                nargs=2,
                metavar=("RUN", "NEW_RUN"),
                help="train the router on the new cluster, too: run folders with the old clusters' shards and with the "
                "new one's",
            )

        if name != "remove":
            action.add_argument(
                "--trust",
                type=Path,
                action="append",
                metavar="KEY",
                help="public key that must have signed ARTIFACT; repeat it for more",
            )

        action.add_argument("--out", type=Path, required=True, metavar="OUT", help="new folder, a saved ensemble")


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
        line = line_of(error)
        if line is None:
            raise

        say(f"error: {line}")
        return 2
    except KeyboardInterrupt:
        remedy = "; run the same command again to resume" if options.command in _RESUMABLE else ""
        say(f"interrupted{remedy}")
        return STOPPED


def _run(options: argparse.Namespace) -> int:
    """Load the experiment and call the command. ``prepare`` and ``fit`` refuse a bad file before torch is imported."""
    if options.command == "ensemble":
        from ddm_lightning.cli.sampling import change_ensemble

        change_ensemble(options)
        return 0

    if options.command == "init":
        from ddm_lightning.cli.init import init

        init(options)
        return 0

    from ddm_lightning.config.load import load_experiment, to_yaml

    if options.command in ("fit", "replay", "ema"):
        options.member = "all"
        for text in [*options.overrides]:
            if text.startswith("member="):
                options.member = text.removeprefix("member=")
                options.overrides.remove(text)

    if options.command == "fit" and options.member != "all":
        stop_as_by_ctrl_c()
    if getattr(options, "out", options.config) is None and "://" in options.config:
        raise UserError(f"{options.config}: a URL cannot hold results; add --out FOLDER")

    experiment = None
    if options.command in ("config", "prepare", "fit", "launch", "plan"):  # they may make the run
        experiment = load_experiment(options.config, options.overrides)
    elif options.command == "status":  # needs no torch for a run on this machine
        from ddm_lightning.members.run_folder import load_recorded

        experiment = load_recorded(options.config, options.overrides)

    if experiment is None:
        from ddm_lightning.use.settings import load_settings

        experiment = load_settings(
            options.config,
            options.overrides,
            allow_paths=getattr(options, "allow_paths", True),  # commands without the option use no encoder
        )

    if options.command == "config":
        print(to_yaml(experiment), end="")
        return 0

    from ddm_lightning.cli.run import run_command

    return run_command(experiment, options)


def _at_home(word: str) -> str:
    """Expand ``~`` in a word: a shell does not in ``--out=~/images``, and other programs never do."""
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + os.path.expanduser(value)  # noqa: PTH111 (pathlib would change URLs)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)

    if arguments is None:
        arguments = sys.argv[1:]

    arguments = [_at_home(hide_passwords(text)) for text in arguments]
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)

    options, rest = parser.parse_known_args(arguments)
    # argparse takes positionals from one place only; overrides may also stand between and after options.
    is_fixed = options.command in ("ensemble", "init")
    strays = [text for text in rest if is_fixed or text.startswith("-") or "=" not in text]
    if strays:
        parser.error(
            f"unrecognized arguments: {' '.join(strays)}; settings are given as key=value, to commands with -c; "
            f"`{options.command} --help` lists options"
        )

    options.overrides = [*getattr(options, "overrides", ()), *rest]
    return options
