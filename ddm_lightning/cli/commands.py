"""Commands that make a run and judge it. Modules that need Lightning or Streaming are imported where they are used."""

from __future__ import annotations

import argparse
import math

from rich.console import Console

from ddm_lightning import api
from ddm_lightning.cli.status import command_line, print_skipped
from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError, redacted, say
from ddm_lightning.core.processes import STOPPED
from ddm_lightning.ensemble.manifest import assemble
from ddm_lightning.islands.local import fit_on_island
from ddm_lightning.islands.plan_data import data_of
from ddm_lightning.islands.publish import published
from ddm_lightning.members.roles import one_member, parse_members
from ddm_lightning.members.run import Run


def _run(experiment: Experiment, options: argparse.Namespace) -> api.Run:
    return api.Run(options.config, options.overrides, experiment=experiment)


def prepare_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``prepare``."""
    run = _run(experiment, options)
    if options.dry_run:
        run.check()
        _dry_run(run, options)
        return

    prepared = run.prepare(prune=options.prune, parts=options.parts)
    if prepared is None:
        print(f"share {options.parts}: done")
        return

    print(f"shards: {redacted(Run(experiment).shards)}")
    print(f"report: {prepared / 'report' / 'report.html'}, {prepared / 'clusters.png'}")
    print(f"next: {command_line('fit', options)}")


def _dry_run(run: api.Run, options: argparse.Namespace) -> None:
    from ddm_lightning.prepare.dry_run import bucket_table, dry_run, dry_run_table
    from ddm_lightning.prepare.engine import num_gpus_for, num_processes_for
    from ddm_lightning.prepare.filters import filter_table

    prepare = run.experiment.prepare
    console = Console()
    plan = dry_run(run.experiment, run.folder.root, run.check_sizes)
    num_processes = num_processes_for(prepare, plan.num_parts, plan.num_samples)
    console.print(dry_run_table(plan, num_processes, num_gpus_for(prepare)))
    print(plan.seen)
    looked = plan.looked
    if looked.sizes:
        console.print(bucket_table(looked))
    if prepare.filters or prepare.drop_keys or not prepare.images.upscale:
        title = f"filters, by {looked.num_read:,} samples"
        console.print(filter_table(looked.num_read, looked.filtered, len(looked.broken), title))

    print(f"stages to run: {', '.join(plan.stages) or 'none, all is up to date'}")
    print(f"parts to encode: {plan.num_unfinished_parts} of {plan.num_parts}\nnothing was written")
    kept = None
    also = ["--device", "here"]
    if plan.num_kept != plan.num_samples:
        kept = plan.num_kept
        also += ["--samples", str(kept)]

    print(f"data, as in plan: {data_of(run.experiment, kept, plan.looked.plugins)}")
    print(f"what the members will need (for a GPU: --device NAME): {command_line('plan', options)} {' '.join(also)}")


def fit_command(experiment: Experiment, options: argparse.Namespace) -> int | None:
    """Run ``fit``."""
    run = _run(experiment, options)
    members = parse_members(options.member, experiment)
    if len(members) == 1 and options.member != "all":  # "all" is assembled, too, even if it is one expert
        return _fit_here(members[0], run, options)

    return _fit_several(members, run, options)


def _fit_here(member: str, run: api.Run, options: argparse.Namespace) -> int | None:
    """Train one member in this process."""
    opened = run.to_train(member)
    state = fit_on_island(opened.member(member), opened)
    if state == "stopped":
        return STOPPED
    if state == "done":
        print_skipped([member], opened, options)
        print(f"artifact: {run.folder.artifact(member)}\ncurves: tensorboard --logdir {run.folder.root}")

    return None


def _fit_several(members: list[str], run: api.Run, options: argparse.Namespace) -> int | None:
    opened = Run(run.experiment)
    failed = None
    try:
        run.fit(options.member, jobs=options.jobs)
    except api.FitError as error:
        failed = error

    Console().print(run.status())
    print_skipped(members, opened, options)
    if failed is not None:
        say(str(failed))
        return failed.code

    if all(map(opened.is_finished, opened.names)):
        print(f"ensemble: {run.folder.ensemble}\nsamples: {run.grid}")
        clusters = run.folder.prepared / "clusters.png"
        if clusters.exists():
            print(f"clusters: {clusters}")

        print(f"next: {next_sample(run.experiment, options)}")

    print(f"curves: tensorboard --logdir {run.folder.root}")
    return None


def next_sample(experiment: Experiment, options: argparse.Namespace) -> str:
    """Command line that samples the ensemble."""
    kind = experiment.condition.kind
    return command_line("sample", options) + {"class": " --class …", "none": ""}.get(kind, " --prompt …")


def replay_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``replay``."""
    run = Run.open(experiment)
    member = one_member(options.member, experiment, options.command)

    from ddm_lightning.evaluation.replay import replay_step, replay_table

    skipped, weights, samples = replay_step(member, run, options.step, options.rank)
    print(f"step {skipped.step} of {member}, rank {skipped.rank}, with {weights}")
    Console().print(replay_table(samples))
    if all(math.isfinite(sample.gradient_norm) for sample in samples):
        print("every gradient is finite here: the cause is that step's weights, or a sample of another rank (--rank)")


def ema_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``ema``."""
    run = Run.open(experiment)
    member = one_member(options.member, experiment, options.command)
    width = None
    if options.use not in (None, "original"):
        try:
            width = float(options.use)
        except ValueError:
            raise UserError(f"--use {options.use}: give a width such as 0.08, or original") from None

    from ddm_lightning.evaluation.ema_choice import EmaWidths, widths_table

    widths = EmaWidths(member, run)
    if options.use is None:
        Console().print(widths_table(widths.compare(options.width)))
        print(f"next: {command_line('ema', options)} member={member} --use WIDTH")
        return

    with published(member, run):  # else the next command would fetch the former artifact from the URL
        widths.use(width)

    print(f"artifact: {run.folder.artifact(member)}")
    if run.folder.ensemble.exists() and member in run.names:
        assemble(run)
        _run(experiment, options).grid.unlink(missing_ok=True)  # from other weights; fit and sample make it again
        print(f"ensemble: {run.folder.ensemble}\nnext: {next_sample(experiment, options)}")


def evaluate_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``evaluate``."""
    results = _run(experiment, options).evaluate(options.images, options.out)
    if results is not None:
        Console().print(results)
        print(f"results: {results.path}")


def diagnose_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``diagnose``."""
    run = _run(experiment, options)
    figures = run.diagnose(options.strategy, options.num)

    from ddm_lightning.evaluation.diagnosis_report import diagnosis_lines, diagnosis_table

    Console().print(diagnosis_table(figures))
    print(*diagnosis_lines(figures), sep="\n")
    print(f"diagnosis: {run.folder.root / 'diagnosis' / 'diagnosis.json'}, and figures beside it")
