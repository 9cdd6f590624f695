"""What each command does: one thin function, which imports what it needs when it is called."""

from __future__ import annotations

import argparse
import itertools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddm_lightning.core import processes
from ddm_lightning.core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from ddm_lightning.config import Experiment
    from ddm_lightning.members.run_folder import RunFolder

INTERRUPTED = 130


def _load(options: argparse.Namespace) -> Experiment:
    from ddm_lightning.config import load_experiment

    return load_experiment(options.config, options.overrides)


def _load_of_run(options: argparse.Namespace) -> Experiment:
    """The experiment of a run that is there, whose record stands in for the overrides that it was made with."""
    from ddm_lightning.members.run_folder import load_run

    return load_run(options.config, options.overrides)


def _command(name: str, options: argparse.Namespace) -> str:
    """A command to type next, with the file and the overrides of this one."""
    return shlex.join(["python", "-m", "ddm_lightning", name, "-c", options.config, *options.overrides])


def _config(options: argparse.Namespace) -> int:
    from ddm_lightning.config import to_yaml

    print(to_yaml(_load(options)), end="")
    return 0


def _prepare(options: argparse.Namespace) -> int:
    experiment = _load(options)
    if options.dry_run:
        return _dry_run(experiment, options)
    run = _prepared(experiment, options)
    print(f"shards: {run.shards}\nreport: {run.prepared / 'report' / 'report.html'}, {run.prepared / 'clusters.png'}")
    print(f"next: {_command('fit', options)}")
    return 0


def _dry_run(experiment: Experiment, options: argparse.Namespace) -> int:
    from rich.console import Console

    from ddm_lightning.cli.check_plugins import check_plugins
    from ddm_lightning.members.run_folder import RunFolder, refuse_changed
    from ddm_lightning.prepare.dry_run import dry_run, dry_run_table
    from ddm_lightning.prepare.engine import num_processes_for

    check_plugins(experiment, options.config, options.overrides)
    refuse_changed(experiment)
    _limit_threads(experiment)
    plan = dry_run(experiment, RunFolder.of(experiment).root)
    num_processes = num_processes_for(experiment.prepare.num_processes, plan.num_parts, plan.num_samples)
    Console().print(dry_run_table(plan, num_processes))
    print(f"stages to run: {', '.join(plan.stages) or 'none, all is up to date'}")
    print(f"parts to encode: {plan.num_unfinished_parts} of {plan.num_parts}")
    print("nothing was written")
    return 0


def _prepared(experiment: Experiment, options: argparse.Namespace) -> RunFolder:
    from ddm_lightning.cli.check_plugins import check_networks, check_plugins
    from ddm_lightning.members.run_folder import RunFolder, open_run, refuse_changed
    from ddm_lightning.prepare.progress import RichReporter
    from ddm_lightning.prepare.stages import prepare

    check_plugins(experiment, options.config, options.overrides)
    refuse_changed(experiment)
    _limit_threads(experiment)
    with RichReporter() as reporter:
        prepare(
            experiment,
            RunFolder.of(experiment).root,
            reporter,
            check=lambda sizes: check_networks(experiment, sizes, options.config, options.overrides),
            prune=getattr(options, "prune", False),
        )
    # Not before: what prepare refuses may be changed without taking another folder.
    return open_run(experiment, create=True)


def _limit_threads(experiment: Experiment) -> None:
    """As the members do: on a shared machine more threads than quiet cores are slower than one."""
    import torch

    torch.set_num_threads(experiment.island.num_threads)


def _load_for_members(
    options: argparse.Namespace, load: Callable[[argparse.Namespace], Experiment] = _load
) -> tuple[Experiment, list[str]]:
    """The experiment, and the members that ``member=`` names, which is taken out of the overrides."""
    chosen = [text for text in options.overrides if text.startswith("member=")]
    options.overrides = [text for text in options.overrides if not text.startswith("member=")]
    experiment = load(options)

    from ddm_lightning.members.member import parse_members

    return experiment, parse_members(chosen[-1].removeprefix("member=") if chosen else "all", experiment)


def _load_for_member(options: argparse.Namespace) -> tuple[Experiment, str]:
    """``_load_for_members`` for a command that takes one, of a run that is there."""
    experiment, members = _load_for_members(options, _load_of_run)
    if len(members) != 1:
        raise UserError(f"{options.command}: name the member, such as member=expert-0")
    return experiment, members[0]


def _fit(options: argparse.Namespace) -> int:
    named = [text for text in options.overrides if text.startswith("member=")]
    experiment, members = _load_for_members(options)
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")

    from ddm_lightning.core.devices import check_devices

    check_devices(experiment.island.accelerator, experiment.island.devices)
    if len(members) == 1 and named and named[-1] != "member=all":
        return _fit_one(members[0], experiment, options)
    return _fit_several(members, experiment, options)  # all members, also where that is one expert


def _fit_one(member: str, experiment: Experiment, options: argparse.Namespace) -> int:
    from ddm_lightning.cli.check_plugins import check_networks, check_plugins
    from ddm_lightning.members.run_folder import RunFolder, open_run, refuse_changed
    from ddm_lightning.shards.manifest import Manifest

    processes.stop_as_by_ctrl_c()
    check_plugins(experiment, options.config, options.overrides)
    refuse_changed(experiment)
    run = RunFolder.of(experiment)
    manifest = Manifest.read(run.root)  # an island is handed prepared shards; it does not make them
    if not run.experiment.exists():
        check_networks(experiment, manifest, options.config, options.overrides)
    was_there, checkpoints = run.experiment.exists(), _names_in(run.member(member) / "checkpoints")
    open_run(experiment, create=True)
    try:
        return _fit_in(run, member, experiment, options)
    except UserError:
        # Refused before its first step: the folder belongs to no experiment yet, and the corrected one is welcome.
        if not was_there and _names_in(run.member(member) / "checkpoints") == checkpoints:
            run.experiment.unlink(missing_ok=True)
        raise


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _fit_in(run: RunFolder, member: str, experiment: Experiment, options: argparse.Namespace) -> int:
    from ddm_lightning.islands.assembly import refuse_stale

    refuse_stale([member], experiment, run)

    from ddm_lightning.training.fit import fit_member
    from ddm_lightning.training.parallel.ranks import leads

    processes.end_imports()
    status = fit_member(member, experiment, run, show_progress=sys.stderr.isatty())
    if not leads():
        return 0  # a rank that Lightning started: the one that started it speaks, and is killed at any other code
    if status.state == "stopped":
        return INTERRUPTED
    _say_skipped([member], run, options)
    print(f"artifact: {run.artifact(member)}\ncurves: tensorboard --logdir {run.root}")
    return 0


def _is_collected(members: Sequence[str], experiment: Experiment) -> bool:
    """Whether artifacts of all members lie beside a manifest in a folder in which nothing was prepared.

    Raises:
        UserError: some are missing; to prepare and train them here is not what who copies artifacts wants.
    """
    from ddm_lightning.members.run_folder import RunFolder

    run = RunFolder.of(experiment)
    was_handed = (run.prepared / "manifest.json").exists() and not (run.prepared / "parts.json").exists()
    missing = [member for member in members if not run.is_finished(member)]
    if was_handed and missing:
        raise UserError(
            f"{run.prepared / 'manifest.json'}: came from where the shards were prepared, and here is no artifact of "
            f"{', '.join(missing)}; copy those to {run.root / 'members'}/NAME/artifact, or train one of them here with "
            f"member={missing[0]}"
        )
    return was_handed


def _fit_several(members: list[str], experiment: Experiment, options: argparse.Namespace) -> int:
    from rich.console import Console

    from ddm_lightning.cli.check_plugins import check_strategy
    from ddm_lightning.islands.assembly import assemble, refuse_stale
    from ddm_lightning.members.run_folder import open_run

    console = Console()
    check_strategy(experiment, options.config, options.overrides)
    run = open_run(experiment, create=True) if _is_collected(members, experiment) else _prepared(experiment, options)
    refuse_stale(members, experiment, run)

    from ddm_lightning.islands.local import FitInterruptedError, default_jobs, fit_members
    from ddm_lightning.islands.status import members_table
    from ddm_lightning.members.handover import is_finished
    from ddm_lightning.members.member import ensemble_members, train_config

    try:
        failures = fit_members(members, experiment, run, options.jobs or default_jobs(experiment), console)
    except FitInterruptedError:
        raise KeyboardInterrupt from None
    console.print(members_table(experiment, run))
    _say_skipped(members, run, options)
    for member, reason in failures.items():
        print(f"{member}: {reason}", file=sys.stderr)
    if failures:
        print(f"logs: {run.root / 'members'}; the same command trains what is unfinished", file=sys.stderr)
        return 1
    if all(
        is_finished(member, train_config(member, experiment).max_steps, run) for member in ensemble_members(experiment)
    ):
        is_new = assemble(experiment, run)
        grid = _grid(experiment, run)
        if grid.exists() and not is_new:
            print("all members are finished and their pictures drawn: nothing to do")
        else:
            _draw(experiment, run, experiment.sample.prompts, grid)
        print(f"ensemble: {run.ensemble}\nsamples: {grid}")
        if (run.prepared / "clusters.png").exists():
            print(f"clusters: {run.prepared / 'clusters.png'}")
        print(f"next: {_sample_command(experiment, options)}")
    print(f"curves: tensorboard --logdir {run.root}")
    return 0


def _say_skipped(members: Sequence[str], run: RunFolder, options: argparse.Namespace) -> None:
    from ddm_lightning.islands.status import skipped_lines

    for line in skipped_lines(members, run, _command("replay", options)):
        print(line)


def _grid(experiment: Experiment, run: RunFolder) -> Path:
    return run.samples / f"{experiment.sample.strategy}.png"


def _next_sheet(experiment: Experiment, folder: Path) -> Path:
    """A file that is not there yet: what was drawn before, and the grid of the experiment's own prompts, stay."""
    sheets = (folder / f"{experiment.sample.strategy}-{number:03d}.png" for number in itertools.count(1))
    return next(path for path in sheets if not path.exists())


def _sample_command(experiment: Experiment, options: argparse.Namespace) -> str:
    kind = experiment.condition.kind
    return _command("sample", options) + {"class": " --class …", "none": ""}.get(kind, " --prompt …")


def _draw(experiment: Experiment, run: RunFolder, prompts: Sequence[str], path: Path, **more: Any) -> None:
    from ddm_lightning.evaluation.samples import draw_run

    _limit_threads(experiment)
    draw_run(run.root, experiment, prompts, path, show_progress=sys.stderr.isatty(), **more)


def _sample(options: argparse.Namespace) -> int:
    experiment = _load_of_run(options)

    from ddm_lightning.cli.check_plugins import check_strategy
    from ddm_lightning.config import check_experiment
    from ddm_lightning.ensemble.routing import strategy_of
    from ddm_lightning.evaluation.samples import check_out
    from ddm_lightning.members.member import ensemble_members
    from ddm_lightning.members.run_folder import open_run

    if options.strategy not in (None, experiment.sample.strategy):
        experiment.sample = replace(experiment.sample, strategy=options.strategy, strategy_params={})
        check_experiment(experiment, f"--strategy {options.strategy}")
        solvers = strategy_of(experiment.sample).solvers
        if experiment.sample.solver not in solvers:
            experiment.sample = replace(experiment.sample, solver=solvers[0])
        check_strategy(experiment, f"--strategy {options.strategy}")
    else:
        check_strategy(experiment, options.config, options.overrides)
    if options.num is not None:
        experiment.sample = replace(experiment.sample, num_per_prompt=options.num)
        check_experiment(experiment, f"--num {options.num}")
    run = open_run(experiment, create=False)
    if options.seed is not None:
        experiment.seed = options.seed
        check_experiment(experiment, f"--seed {options.seed}")
    as_in_file = not any(text.startswith("sample.") for text in options.overrides)
    is_own = as_in_file and not any((options.prompt, options.classes, options.num, options.seed is not None))
    given = run.samples if options.out is None else check_out(options.out)
    own = _grid(experiment, run)
    path = (
        given if given.suffix == ".png" else own if is_own and given == run.samples else _next_sheet(experiment, given)
    )
    unfinished = [member for member in ensemble_members(experiment) if not run.is_finished(member)]
    if unfinished and not run.ensemble.exists():
        raise UserError(
            f"{run.ensemble}: is not there yet, because these members are not finished: {', '.join(unfinished)}; "
            f"train them: {_command('fit', options)}"
        )
    prompts, singles = options.prompt or experiment.sample.prompts, path.with_suffix("")
    _draw(experiment, run, prompts, path, classes=options.classes or (), singles=singles)
    print(f"samples: {path}\nsingle images: {singles}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from rich.console import Console

    experiment = _load_of_run(options)

    from ddm_lightning.members.run_folder import open_run

    run = open_run(experiment, create=False)

    from ddm_lightning.islands.status import members_table, shown_members

    Console().print(members_table(experiment, run))
    _say_skipped(shown_members(experiment, run), run, options)
    print(f"curves: tensorboard --logdir {run.root}")
    return 0


def _replay(options: argparse.Namespace) -> int:
    from rich.console import Console

    experiment, member = _load_for_member(options)

    from ddm_lightning.members.run_folder import open_run

    run = open_run(experiment, create=False)

    from ddm_lightning.training.replay import replay_step, replay_table

    replay = replay_step(member, experiment, run, options.step, options.rank)
    print(f"step {replay.skipped.step} of {member}, rank {replay.skipped.rank}, with {replay.weights}")
    Console().print(replay_table(replay))
    if replay.blames_none():
        print(
            "each gradient is finite here: the weights of that step were to blame, not these samples, or those of "
            "another rank (--rank)"
        )
    return 0


def _width(use: str | None) -> float | None:
    """What ``--use`` asks for; None for the original, and where it is not given."""
    try:
        return None if use in (None, "original") else float(str(use))
    except ValueError:
        raise UserError(f"--use {use}: give a width such as 0.08, or original") from None


def _ema(options: argparse.Namespace) -> int:
    from rich.console import Console

    experiment, member = _load_for_member(options)
    if options.use is not None and options.width is not None:
        raise UserError("ema: --width compares and --use hands over; give one of them")
    width = _width(options.use)

    from ddm_lightning.members.member import ensemble_members
    from ddm_lightning.members.run_folder import open_run

    run = open_run(experiment, create=False)
    _limit_threads(experiment)

    from ddm_lightning.islands.assembly import assemble
    from ddm_lightning.training.ema_choice import Averages, widths_table

    averages = Averages(member, experiment, run)
    if options.use is None:
        Console().print(widths_table(averages.compare(options.width)))
        print(f"next: {_command('ema', options)} member={member} --use WIDTH")
        return 0
    if width is None:
        averages.use_original()
    else:
        averages.use(width)
    print(f"artifact: {run.artifact(member)}")
    if run.ensemble.exists() and member in ensemble_members(experiment):
        assemble(experiment, run)
        _grid(experiment, run).unlink(missing_ok=True)  # of other weights; fit and sample draw it anew
        print(f"ensemble: {run.ensemble}\nnext: {_sample_command(experiment, options)}")
    return 0


COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "prepare": _prepare,
    "fit": _fit,
    "sample": _sample,
    "replay": _replay,
    "ema": _ema,
    "status": _status,
    "config": _config,
}
