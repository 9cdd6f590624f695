"""One thin function per command. Modules that need Lightning or Streaming are imported where they are used."""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ddm_lightning.cli.islands import (
    check_positive,
    command_line,
    launch_members,
    print_skipped,
    show_plan,
    show_status,
    table_of,
)
from ddm_lightning.config.experiment import Experiment, SampleConfig
from ddm_lightning.config.merge import island_of
from ddm_lightning.core.devices import check_devices, configure_torch
from ddm_lightning.core.environment import Ranks, check_meeting, leave_ranks
from ddm_lightning.core.errors import UserError, note, redacted, say
from ddm_lightning.core.formatting import Bars
from ddm_lightning.core.processes import STOPPED
from ddm_lightning.core.registry import require
from ddm_lightning.ensemble.changes import added, removed, replaced
from ddm_lightning.ensemble.manifest import EnsembleManifest, assemble
from ddm_lightning.islands.local import default_jobs, fit_members, fit_on_island
from ddm_lightning.islands.publish import published
from ddm_lightning.islands.shared import (
    check_free,
    is_prepared_elsewhere,
    publish_prepared,
    pull_ensemble,
    pull_manifest,
)
from ddm_lightning.islands.status import Watch
from ddm_lightning.members.member import ROUTER, STUDENT, parse_members
from ddm_lightning.members.preflight import check_networks, check_plugins, check_strategy, is_collected, refuse_stale
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder, refuse_changed
from ddm_lightning.members.signatures import PREPARE, check_keys, sign_manifest, verify
from ddm_lightning.use.download import fetched
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.export import CONDITION_FILE, export_diffusers, export_member, export_peft
from ddm_lightning.use.saved import manifest_with_about, save_ensemble
from ddm_lightning.use.settings import resolve


def _prepare(experiment: Experiment, options: argparse.Namespace) -> None:
    _check(experiment, options)
    if options.dry_run:
        _dry_run(experiment, options)
        return

    run = _prepared(experiment, options)
    prepared = RunFolder.of(experiment).prepared
    if options.parts is not None:  # a folder without shards is left, and would be taken for the run's shards
        shutil.rmtree(prepared / "shards", ignore_errors=True)

    if run is None:
        print(f"share {options.parts}: done")
        return

    print(f"shards: {redacted(run.shards)}")
    print(f"report: {prepared / 'report' / 'report.html'}, {prepared / 'clusters.png'}")
    print(f"next: {command_line('fit', options)}")


def _dry_run(experiment: Experiment, options: argparse.Namespace) -> None:
    from ddm_lightning.prepare.dry_run import dry_run, dry_run_table
    from ddm_lightning.prepare.engine import num_gpus_for, num_processes_for
    from ddm_lightning.prepare.filters import filter_table

    prepare = experiment.prepare
    console = Console()
    check = partial(check_networks, experiment, source=options.config, overrides=options.overrides)
    plan = dry_run(experiment, RunFolder.of(experiment).root, check)
    num_processes = num_processes_for(prepare, plan.num_parts, plan.num_samples)
    console.print(dry_run_table(plan, num_processes, num_gpus_for(prepare)))
    print(plan.seen)
    if prepare.filters or prepare.drop_keys:
        looked = plan.looked
        title = f"filters, by {looked.num_read:,} samples"
        console.print(filter_table(looked.num_read, looked.filtered, len(looked.broken), title))

    print(f"stages to run: {', '.join(plan.stages) or 'none, all is up to date'}")
    print(f"parts to encode: {plan.num_unfinished_parts} of {plan.num_parts}\nnothing was written")
    print(f"what the members will need (your GPU: add --device NAME): {command_line('plan', options)}")


def _check(experiment: Experiment, options: argparse.Namespace, members: Sequence[str] = ()) -> None:
    check_plugins(experiment, options.config, options.overrides)
    refuse_changed(experiment)
    run = Run(experiment)
    for name in (PREPARE, *members):
        check_keys(name, run)


def _prepared(experiment: Experiment, options: argparse.Namespace) -> Run | None:
    """Prepare the run, or this machine's share of it, if it is not up to date, and open its folder.

    Returns:
        None if another machine completes the preparation.
    """
    from ddm_lightning.prepare.engine import Reporter
    from ddm_lightning.prepare.share import Share
    from ddm_lightning.prepare.stages import prepare

    parts = getattr(options, "parts", None)  # fit has neither --parts nor --prune
    share = None if parts is None else Share.parse(parts)
    folder = RunFolder.of(experiment).root
    check = partial(check_networks, experiment, source=options.config, overrides=options.overrides, initial=True)
    check_free(Run(experiment), parts=share is not None)
    with Bars(Console(), transient=True) as bars:
        reporter = Reporter(bars)
        manifest = prepare(experiment, folder, reporter, check, getattr(options, "prune", False), share)
        if manifest is None:
            return None

        check(manifest)  # also if it is up to date
        # Only now: after an error in prepare, the corrected experiment may use the same folder.
        run = Run.open(experiment, create=True)
        sign_manifest(run)
        publish_prepared(run, lambda done, total: reporter.advance("publish", done, total))

    return run


def _one_member(experiment: Experiment, options: argparse.Namespace) -> str:
    members = parse_members(options.member, experiment)
    if len(members) != 1:
        raise UserError(f"{options.command}: name the member, such as member=expert-0")

    return members[0]


def _fit(experiment: Experiment, options: argparse.Namespace) -> int | None:
    members = parse_members(options.member, experiment)
    check_positive("--jobs", options.jobs)
    is_alone = len(members) == 1 and options.member != "all"  # "all" is assembled, too, even if it is one expert
    for member in members:
        island = island_of(member, experiment)
        check_devices(island.accelerator, island.devices)
        if island.nodes > 1 and not is_alone:
            raise UserError(f"key 'island.nodes' = {island.nodes}: start fit on each node with member={member} alone")

    if is_alone:
        return _fit_one(members[0], experiment, options)

    return _fit_several(members, experiment, options)


def _fit_one(member: str, experiment: Experiment, options: argparse.Namespace) -> int | None:
    experiment = replace(experiment, island=island_of(member, experiment))
    _check(experiment, options, [member])
    run = Run(experiment)
    if member == STUDENT and run.url:  # it needs its teacher
        pull_ensemble(run)
    else:
        pull_manifest(run)

    manifest = run.manifest  # raises unless the shards are prepared; an island does not prepare them
    if not run.folder.experiment.exists():
        check_networks(experiment, manifest, options.config, options.overrides)

    state = fit_on_island(run.member(member), run)
    if state == "stopped":
        return STOPPED
    if state == "done":
        print_skipped([member], run, options)
        print(f"artifact: {run.folder.artifact(member)}\ncurves: tensorboard --logdir {run.folder.root}")

    return None


def _fit_several(members: list[str], experiment: Experiment, options: argparse.Namespace) -> int | None:
    console = Console()
    check_strategy(experiment.sample, options.config, options.overrides)
    started = Ranks.read().world_size
    if started > 1:
        raise UserError(f"{started} processes of fit were started, as by torchrun; start it once, or name a member")

    leave_ranks()
    run = Run(experiment)
    if is_prepared_elsewhere(run):
        pull_ensemble(run)
    elif not is_collected(members, run):
        _check(experiment, options, members)
        _prepared(experiment, options)

    run = Run.open(experiment, create=True)
    refuse_stale([run.member(member) for member in members], run)
    failures = fit_members(members, run, options.jobs or default_jobs(members, experiment), console)
    console.print(table_of(run, Watch(run).look(), console.width))
    print_skipped(members, run, options)
    if failures:
        for member, failure in failures.items():
            say(f"{member}: {failure.reason}")

        say(f"logs: {run.folder.root / 'members'}; run the same command again to train the rest")
        codes = {failure.code for failure in failures.values()}
        if codes in ({2}, {STOPPED}):
            return codes.pop()

        return 1

    if all(map(run.is_finished, run.names)):
        _assemble(run, options)

    print(f"curves: tensorboard --logdir {run.folder.root}")
    return None


def _assemble(run: Run, options: argparse.Namespace) -> None:
    """Assemble the ensemble, and generate its samples if they are missing or of other members."""
    experiment = run.experiment
    is_new = assemble(run)
    grid = _grid(experiment)
    if grid.exists() and not is_new:
        print("all members are finished and their samples are there: nothing to do")
    else:
        from ddm_lightning.use.samples import write_samples

        ensemble = DecentralizedEnsemble.open(experiment, partial=True)
        write_samples(ensemble, grid, experiment.sample.prompts, show_progress=True)

    print(f"ensemble: {run.folder.ensemble}\nsamples: {grid}")
    clusters = run.folder.prepared / "clusters.png"
    if clusters.exists():
        print(f"clusters: {clusters}")

    print(f"next: {_sample_command(experiment, options)}")


def _grid(experiment: Experiment) -> Path:
    return RunFolder.of(experiment).samples / f"{experiment.sample.strategy}.png"


def _sample_command(experiment: Experiment, options: argparse.Namespace) -> str:
    kind = experiment.condition.kind
    return command_line("sample", options) + {"class": " --class …", "none": ""}.get(kind, " --prompt …")


def _print_captions(experiment: Experiment, options: argparse.Namespace) -> None:
    """Print the captions that contain a word, for ``sample --captions``."""
    from ddm_lightning.prepare.prepared import Prepared

    prepared = Prepared(Run.open(experiment).folder.prepared)
    for file in (prepared.index_file, prepared.parts_file):  # a machine of --parts lacks the latter
        if not file.exists():
            raise UserError(f"{file}: is missing; search for captions on the machine that has the images")

    word = options.captions.casefold()
    found = sorted({text for text in prepared.texts("captions") if word in text.casefold()})
    if not found:
        raise UserError(f"--captions {options.captions!r}: no caption contains it; give another word, or '' for all")

    print(*found, sep="\n")


def _sample(experiment: Experiment, options: argparse.Namespace) -> None:
    from ddm_lightning.use.samples import settings_line, write_samples

    given = {"--strategy": options.strategy, "--num": options.num, "--seed": options.seed}
    words = [f"{name} {value}" for name, value in given.items() if value is not None]
    ensemble = DecentralizedEnsemble.open(experiment, partial=True)
    ensemble.manifest = resolve(
        ensemble.manifest,
        options.overrides,
        " ".join(words) or options.config,
        strategy=options.strategy,
        num_per_prompt=options.num,
        seed=options.seed,
    )
    settings = ensemble.about.sample
    path = _grid_to_write(experiment, settings, options)
    files = write_samples(
        ensemble,
        path,
        options.prompt or settings.prompts,
        classes=options.classes or (),
        singles=path.with_suffix(""),
        gif=options.gif,
        show_progress=True,
    )
    print(f"samples: {path}\nsingle images: {path.with_suffix('')}")
    for name, file in files.items():
        print(f"{name}: {file}")

    print(f"settings: {settings_line(settings)}")
    cost = ensemble.cost
    print(f"cost: {cost.gflop:.3g} GFLOP per image, {cost.experts:.2f} active experts on average")


def _grid_to_write(experiment: Experiment, settings: SampleConfig, options: argparse.Namespace) -> Path:
    """Path of the grid: that of ``fit``, if only a strategy was given; else a new file, so that earlier ones stay."""
    from ddm_lightning.use.samples import check_out

    samples = RunFolder.of(experiment).samples
    folder = samples
    if options.out is not None:
        folder = check_out(options.out)
        if folder.suffix == ".png":
            return folder

    changed = [options.prompt, options.classes, options.num, options.seed is not None]
    changed += [text.startswith("sample.") for text in options.overrides]
    if folder == samples and not any(changed):
        return samples / f"{settings.strategy}.png"

    name = settings.member or settings.strategy
    numbered = (folder / f"{name}-{number:03d}.png" for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


def _evaluate(experiment: Experiment, options: argparse.Namespace) -> None:
    check_strategy(experiment.sample, options.config, options.overrides)
    check_devices(experiment.island.accelerator, 1)

    from ddm_lightning.evaluation.evaluate import evaluate

    found = evaluate(Run(experiment), options.images, options.out, show_progress=True)
    if found is not None:
        path, table = found
        Console().print(table)
        print(f"results: {path}")


def _diagnose(experiment: Experiment, options: argparse.Namespace) -> None:
    check_positive("--num", options.num)
    check_devices(experiment.island.accelerator, 1)
    run = Run.open(experiment)

    from ddm_lightning.evaluation.diagnosis import diagnose
    from ddm_lightning.evaluation.diagnosis_report import diagnosis_lines, diagnosis_table

    figures = diagnose(run, options.strategy, options.num, options.overrides, show_progress=True)
    Console().print(diagnosis_table(figures))
    print(*diagnosis_lines(figures), sep="\n")
    print(f"diagnosis: {run.folder.root / 'diagnosis' / 'diagnosis.json'}, and figures beside it")


def _replay(experiment: Experiment, options: argparse.Namespace) -> None:
    run = Run.open(experiment)
    member = _one_member(experiment, options)

    from ddm_lightning.evaluation.replay import replay_step, replay_table

    skipped, weights, samples = replay_step(member, run, options.step, options.rank)
    print(f"step {skipped.step} of {member}, rank {skipped.rank}, with {weights}")
    Console().print(replay_table(samples))
    if all(math.isfinite(sample.gradient_norm) for sample in samples):
        print("every gradient is finite here: the cause is that step's weights, or a sample of another rank (--rank)")


def _ema(experiment: Experiment, options: argparse.Namespace) -> None:
    run = Run.open(experiment)
    member = _one_member(experiment, options)
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
        _grid(experiment).unlink(missing_ok=True)  # from other weights; fit and sample make it again
        print(f"ensemble: {run.folder.ensemble}\nnext: {_sample_command(experiment, options)}")


def _export(experiment: Experiment, options: argparse.Namespace) -> None:
    out = options.out
    member = experiment.sample.member if options.to == "diffusers" else None
    manifest = manifest_with_about(RunFolder.of(experiment).root, experiment, member=member)
    if options.to == "peft":
        others = export_peft(manifest, out)
        if others:
            note(f"{', '.join(others)}: trained, but no adapters; {CONDITION_FILE} beside each adapter keeps them")

        whole = [name for name in manifest.experts if manifest.metas[name].lora is None]
        if whole:
            note(f"{', '.join(whole)}: left out, no adapter")

        print(f"peft: {out}")
        return

    if options.to == "ensemble":
        save_ensemble(manifest, out, options.licence)
    elif member is None:
        export_diffusers(manifest, out, options.licence)
    else:
        lost = export_member(manifest, out, options.licence)
        if lost:
            note(
                f"diffusers has no place for {', '.join(lost)}; {out / CONDITION_FILE} keeps it, but its pipelines do "
                "not read that file: the model card says what to do"
            )

    print(f"{options.to}: {out}\nmodel card: {out / 'README.md'}")


def change_ensemble(options: argparse.Namespace) -> None:
    """Run ``ensemble add``, ``remove`` or ``replace``, which need no experiment."""
    if options.action != "remove":
        check_positive("--images", options.images)

    before = manifest_with_about(fetched(options.folder), partial=True)
    with TemporaryDirectory() as scratch:
        after = _changed(before, options, Path(scratch))
        save_ensemble(after, options.out)

    shares = [f"{name} {prior:.4f}" for name, prior in after.shares.items()]
    print(f"ensemble: {options.out}\npriors: {', '.join(shares)}")
    if ROUTER in before.folders and ROUTER not in after.folders:
        print("the router does not know this cluster and was left out: use the strategy bayes, or train a router anew")


def _changed(before: EnsembleManifest, options: argparse.Namespace, scratch: Path) -> EnsembleManifest:
    """The changed ensemble; with ``--tune-router``, its router is in ``scratch``."""
    if options.action == "remove":
        return removed(before, options.member)

    expert = options.artifact
    if options.trust:
        verify(expert, options.trust)

    if options.action == "replace":
        return replaced(before, options.member, expert, options.images)

    after = added(before, expert, options.images)
    if options.tune_router is None or ROUTER in after.folders:
        return after

    from ddm_lightning.training.extension import extend_router

    seen, new = map(RunFolder, options.tune_router)
    extend_router(before, expert, options.images / after.description.num_images, seen, new, scratch / ROUTER)
    return added(before, expert, options.images, scratch / ROUTER)


def _demo(experiment: Experiment, options: argparse.Namespace) -> None:
    require("demo", "gradio", extra="page")
    from ddm_lightning.prepare.prepared import example_captions
    from ddm_lightning.use.page import NUM_EXAMPLES, listen, serve

    check_strategy(experiment.sample, options.config, options.overrides)
    with listen(options.host, options.port) as listener:  # before anything is loaded
        ensemble = DecentralizedEnsemble.open(experiment, partial=True)
        serve(ensemble, listener, options.host, example_captions(RunFolder.of(experiment).prepared, NUM_EXAMPLES))


def run_command(experiment: Experiment, options: argparse.Namespace) -> int:
    """Run a command of ``COMMANDS`` with as many threads as a member has; more threads than idle cores slow it down."""
    if options.command not in ("fit", "evaluate"):
        leave_ranks()

    check_meeting()
    configure_torch(experiment.island.accelerator, experiment.island.num_threads)
    if getattr(options, "captions", None) is not None:
        _print_captions(experiment, options)
        return 0

    # Only the first rank of ``evaluate`` fetches; the others wait for it.
    if options.command in _NEED_ENSEMBLE and Ranks.read().rank == 0:
        member = experiment.sample.member
        if options.command == "diagnose" or getattr(options, "to", None) in ("ensemble", "peft"):
            member = None  # it needs all

        pull_ensemble(Run(experiment), member)

    return COMMANDS[options.command](experiment, options) or 0


_NEED_ENSEMBLE = ("sample", "demo", "evaluate", "diagnose", "export")

COMMANDS: Mapping[str, Callable[[Experiment, argparse.Namespace], int | None]] = {
    "prepare": _prepare,
    "fit": _fit,
    "sample": _sample,
    "demo": _demo,
    "evaluate": _evaluate,
    "diagnose": _diagnose,
    "replay": _replay,
    "ema": _ema,
    "export": _export,
    "launch": launch_members,
    "plan": show_plan,
    "status": show_status,
}
"""Every command but ``config``, which needs no torch, and ``ensemble``, which needs no experiment."""
