"""One thin function per command. Modules that need Lightning or Streaming are imported where they are used."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from ddm_lightning import api
from ddm_lightning.cli.islands import command_line, launch_members, print_skipped, show_plan, show_status
from ddm_lightning.config.experiment import Experiment, SampleConfig
from ddm_lightning.core.checks import check_positive
from ddm_lightning.core.devices import configure_torch
from ddm_lightning.core.environment import check_meeting, leave_ranks
from ddm_lightning.core.errors import UserError, note, redacted, say
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.processes import STOPPED
from ddm_lightning.core.registry import require
from ddm_lightning.ensemble.changes import added, removed, replaced
from ddm_lightning.ensemble.manifest import EnsembleManifest, assemble
from ddm_lightning.islands.local import fit_on_island
from ddm_lightning.islands.plan_data import data_of
from ddm_lightning.islands.publish import published
from ddm_lightning.islands.shared import pull_ensemble
from ddm_lightning.members.member import ROUTER, one_member, parse_members
from ddm_lightning.members.preflight import check_strategy
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.signatures import verify
from ddm_lightning.use.call import STRENGTH
from ddm_lightning.use.download import fetched
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.export import CONDITION_FILE, export_diffusers, export_member, export_peft
from ddm_lightning.use.recipe import read_recipe
from ddm_lightning.use.saved import manifest_with_about, save_ensemble
from ddm_lightning.use.settings import resolve


def _run(experiment: Experiment, options: argparse.Namespace) -> api.Run:
    return api.Run(options.config, options.overrides, experiment=experiment)


def _prepare(experiment: Experiment, options: argparse.Namespace) -> None:
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


def _fit(experiment: Experiment, options: argparse.Namespace) -> int | None:
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

        print(f"next: {_sample_command(run.experiment, options)}")

    print(f"curves: tensorboard --logdir {run.folder.root}")
    return None


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
    words += [f"--size {text}" for text in options.sizes or ()]
    ensemble = DecentralizedEnsemble.open(experiment, partial=True)
    if options.strength is not None and options.image is None:
        raise UserError("--strength: has no effect without --image; give both")

    source = options.source
    only = None
    if source is not None:
        recipe = read_recipe(source)
        ensemble.manifest = recipe.applied(ensemble.manifest, options.overrides, source)
        if recipe.image is not None and options.image is None:
            raise UserError(f"{source}: started from an image, SHA-256 {recipe.image[:12]}…; give it with --image")
        if options.image is not None and sha256_file(options.image) != recipe.image:
            note(f"--image {options.image}: is not the image that {source} started from; this makes another one")
        if not (options.prompt or options.classes):
            only = recipe.index

        for name in ("classes", "negative_prompt", "strength"):
            if getattr(options, name) is None:
                setattr(options, name, getattr(recipe, name))

    ensemble.manifest = resolve(
        ensemble.manifest,
        options.overrides,
        " ".join(words) or str(source or options.config),
        strategy=options.strategy,
        num_per_prompt=options.num,
        seed=options.seed,
        size=_sizes(options.sizes),
        exact=options.exact,
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
        only=only,
        negative_prompt=options.negative_prompt or "",
        image=options.image,
        strength=STRENGTH if options.strength is None else options.strength,
    )
    print(f"samples: {path}\nsingle images: {path.with_suffix('')}")
    for name, file in files.items():
        print(f"{name}: {file}")

    print(f"settings: {settings_line(settings)}")
    cost = ensemble.cost
    print(f"cost: {cost.gflop:.3g} GFLOP per image, {cost.experts:.2f} active experts on average")


def _sizes(texts: Sequence[str] | None) -> list[list[int]] | None:
    """Heights and widths given with ``--size``."""
    if texts is None:
        return None

    sizes = []
    for text in texts:
        if re.fullmatch(r"\d{1,6}x\d{1,6}", text) is None:
            raise UserError(f"--size {text}: give height and width in pixels, such as 320x192")

        sizes.append([int(side) for side in text.split("x")])

    return sizes


def _grid_to_write(experiment: Experiment, settings: SampleConfig, options: argparse.Namespace) -> Path:
    """Path of the grid: that of ``fit``, if only a strategy was given; else a new file, so that earlier ones stay."""
    from ddm_lightning.use.samples import check_out

    samples = RunFolder.of(experiment).samples
    folder = samples
    if options.out is not None:
        folder = check_out(options.out)
        if folder.suffix == ".png":
            return folder

    changed = [options.source, options.prompt, options.classes, options.num, options.seed is not None]
    changed += [options.negative_prompt, options.image, options.sizes]
    changed += [text.startswith("sample.") for text in options.overrides]
    if folder == samples and not any(changed):
        return samples / f"{settings.strategy}.png"

    name = settings.member or settings.strategy
    numbered = (folder / f"{name}-{number:03d}.png" for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())


def _evaluate(experiment: Experiment, options: argparse.Namespace) -> None:
    results = _run(experiment, options).evaluate(options.images, options.out)
    if results is not None:
        Console().print(results)
        print(f"results: {results.path}")


def _diagnose(experiment: Experiment, options: argparse.Namespace) -> None:
    run = _run(experiment, options)
    figures = run.diagnose(options.strategy, options.num)

    from ddm_lightning.evaluation.diagnosis_report import diagnosis_lines, diagnosis_table

    Console().print(diagnosis_table(figures))
    print(*diagnosis_lines(figures), sep="\n")
    print(f"diagnosis: {run.folder.root / 'diagnosis' / 'diagnosis.json'}, and figures beside it")


def _replay(experiment: Experiment, options: argparse.Namespace) -> None:
    run = Run.open(experiment)
    member = one_member(options.member, experiment, options.command)

    from ddm_lightning.evaluation.replay import replay_step, replay_table

    skipped, weights, samples = replay_step(member, run, options.step, options.rank)
    print(f"step {skipped.step} of {member}, rank {skipped.rank}, with {weights}")
    Console().print(replay_table(samples))
    if all(math.isfinite(sample.gradient_norm) for sample in samples):
        print("every gradient is finite here: the cause is that step's weights, or a sample of another rank (--rank)")


def _ema(experiment: Experiment, options: argparse.Namespace) -> None:
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

    if options.command in _NEED_ENSEMBLE:
        member = experiment.sample.member
        if getattr(options, "to", None) in ("ensemble", "peft"):
            member = None  # it needs all

        pull_ensemble(Run(experiment), member)

    return COMMANDS[options.command](experiment, options) or 0


_NEED_ENSEMBLE = ("sample", "demo", "export")

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
