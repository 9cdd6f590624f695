"""Commands that use a trained ensemble."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ddm_lightning.config.experiment import Experiment, SampleConfig
from ddm_lightning.core.checks import check_positive
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import require
from ddm_lightning.ensemble.changes import added, removed, replaced
from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.islands.shared import pull_ensemble
from ddm_lightning.members.preflight import check_strategy
from ddm_lightning.members.roles import ROUTER
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


def sample_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``sample``, or print captions."""
    if options.captions is not None:
        _print_captions(experiment, options)
        return

    pull_ensemble(Run(experiment), experiment.sample.member)
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


def export_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``export``."""
    out = options.out
    member = experiment.sample.member if options.to == "diffusers" else None  # the others need all
    pull_ensemble(Run(experiment), member)
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


def demo_command(experiment: Experiment, options: argparse.Namespace) -> None:
    """Run ``demo``."""
    require("demo", "gradio", extra="page")
    pull_ensemble(Run(experiment), experiment.sample.member)
    from ddm_lightning.prepare.prepared import example_captions
    from ddm_lightning.use.page import NUM_EXAMPLES, listen, serve

    check_strategy(experiment.sample, options.config, options.overrides)
    with listen(options.host, options.port) as listener:  # before anything is loaded
        ensemble = DecentralizedEnsemble.open(experiment, partial=True)
        serve(ensemble, listener, options.host, example_captions(RunFolder.of(experiment).prepared, NUM_EXAMPLES))
