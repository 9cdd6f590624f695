"""Runs and saved ensembles, here or at a URL: their settings and manifests, and how they are saved.

A saved ensemble is a folder with ``ensemble.json``, one artifact folder per member and a model card. Settings of
sampling: defaults < experiment file or record < overrides < arguments.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from omegaconf import OmegaConf

from ddm_lightning.config.experiment import (
    ConditionConfig,
    Experiment,
    ExpertConfig,
    PartitionConfig,
    PrepareConfig,
    SampleConfig,
)
from ddm_lightning.config.load import read_override
from ddm_lightning.config.merge import changed
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import DOWNLOADS, UserError
from ddm_lightning.core.files import atomic_folder, check_file, inside
from ddm_lightning.core.weights import check_recorded
from ddm_lightning.ensemble.manifest import (
    About,
    EnsembleManifest,
    read_document,
    read_ensemble,
    single,
    write_manifest,
)
from ddm_lightning.ensemble.routing import strategy_of
from ddm_lightning.members.artifact import REMEDY, WEIGHTS_FILE, base_file, read_meta
from ddm_lightning.members.load import Bases
from ddm_lightning.members.member import all_members, condition_spec, ensemble_members
from ddm_lightning.members.preflight import check_strategy
from ddm_lightning.members.run_folder import (
    ENSEMBLE_FILE,
    MEMBER_FILE,
    SIGNATURE,
    STATEMENT,
    RunFolder,
    load_run,
    refuse_changed,
)
from ddm_lightning.members.signatures import check_manifest, check_used, signature_of
from ddm_lightning.shards.manifest import Manifest, manifest_path

TEMPLATES = Environment(
    loader=PackageLoader(__package__), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
)
"""Model cards."""

# Of an artifact; those of a signature need not exist.
_FILES = (MEMBER_FILE, WEIGHTS_FILE, STATEMENT, SIGNATURE)
# Sections that may be overridden for a saved ensemble.
_FREE = ("island", "sample", "evaluate")


def fetched(address: str | Path) -> Path:
    """Folder of an ensemble: ``address`` itself, or a download of the URL, kept until the program ends.

    Downloads ``ensemble.json``, then only the artifacts that it lists and the files of a run that sampling needs.

    Raises:
        UserError: the URL cannot be read, the folder does not exist, or a path leaves it.
    """
    url = str(address).rstrip("/")
    if not remote.is_url(url):
        if not (local := Path(address).expanduser()).is_dir():
            raise UserError(
                f"{url}: is not a folder here; give one, or a URL (on the Hugging Face hub: hf://owner/name)"
            )

        return local

    run = RunFolder(Path(tempfile.mkdtemp(prefix="ddm_lightning-")).resolve())
    DOWNLOADS[str(run.root)] = url
    atexit.register(shutil.rmtree, run.root, ignore_errors=True)

    def fetch(*paths: Path) -> None:
        """Fetch files, unless they do not exist."""
        for path in paths:
            with suppress(FileNotFoundError):
                remote.get(f"{url}/{path.relative_to(run.root).as_posix()}", path)

    with remote.reaching(f"{url} cannot be read"):
        fetch(run.ensemble)
        document = read_document(run.ensemble)
        for relative in {entry.path for entry in document.members}:
            folder = inside(run.root, relative, run.ensemble)
            fetch(*(folder / file for file in _FILES))
            if (folder / MEMBER_FILE).exists() and (meta := read_meta(folder)).base_sha256 is not None:
                base = base_file(run.root, meta)
                if not base.exists():
                    fetch(base)

        if document.about is None:
            manifest = manifest_path(run.root)
            fetch(run.experiment, manifest, signature_of(manifest))

    return run.root


def manifest_with_about(
    folder: Path, experiment: Experiment | None = None, *, member: str | None = None, partial: bool = False
) -> EnsembleManifest:
    """Read the manifest of a run's or a saved ensemble, and fill in ``about``.

    Args:
        folder: holds ``ensemble.json``.
        experiment: gives the defaults of sampling and the trusted keys; None is the recorded one, and no keys.
        member: of a run, one member alone instead of the ensemble.
        partial: as in ``read_ensemble``.

    Returns:
        The manifest, ``about`` included.

    Raises:
        UserError: there is no such member, one is not finished, a file is missing, damaged or of other data, or a
            signature is refused.
    """
    run = RunFolder(folder)
    if experiment is not None:
        if member not in (None, *(known := all_members(experiment))):
            raise UserError(f"sample.member={member}: unknown member; name one of {', '.join(known)}")

        if not (path := run.sampled_from(member)).exists():
            missing = [name for name in ensemble_members(experiment) if not run.has_artifact(name)]
            if member is None and not missing:
                raise UserError(f"{path}: is missing, although all members are finished; fit writes it again")

            raise UserError(
                f"{path}: does not exist yet, because these members are not finished: "
                f"{member or ', '.join(missing)}; fit them"
            )

    if member:
        ensemble = single(run.artifact(member))
    else:
        ensemble = read_ensemble(run.ensemble, partial=partial)

    about = ensemble.about
    meta = ensemble.meta
    if experiment is not None:
        for name, of_member in ensemble.metas.items():
            check_used(of_member.member, ensemble.folders[name], experiment)

        if about is None:
            check_manifest(experiment, manifest_path(folder))

    if about is None:
        experiment = experiment or load_run(run.experiment)
        prepared = Manifest.read(folder)
        wanted = (prepared.partition_sha256, prepared.x_shape, condition_spec(experiment, prepared))
        if (meta.partition_sha256, meta.x_shape, meta.condition) != wanted:
            raise UserError(
                f"{manifest_path(folder)}: the experts were trained on other data ({meta.x_shape}, {meta.condition}); "
                "copy the manifest from where they were trained"
            )

        about = About(
            name=experiment.name,
            credit=prepared.attribution,
            class_names=prepared.class_names,
            num_images=prepared.num_samples,
            seed=experiment.seed,
            sample=experiment.sample,
        )
    elif experiment is not None:
        about = replace(about, seed=experiment.seed, sample=experiment.sample)

    num_names = len(about.class_names or ())
    num_classes = meta.condition.size
    if meta.condition.kind == "class" and num_names not in (0, num_classes):
        raise UserError(f"{run.ensemble}: {num_names} class_names for {num_classes} classes; fix them")

    num_images = max(1, round(about.num_images * ensemble.share))
    return replace(ensemble, about=replace(about, num_images=num_images))


def experiment_of(manifest: EnsembleManifest) -> Experiment:
    """Build the part of an experiment that sampling from an ensemble needs."""
    about = manifest.description
    meta = manifest.meta
    return Experiment(
        name=about.name,
        seed=about.seed,
        sample=replace(about.sample, member=None),
        condition=ConditionConfig(kind=meta.condition.kind),
        prepare=PrepareConfig(
            image_encoder=meta.image_encoder,
            caption_encoder=meta.caption_encoder,
            partition=PartitionConfig(num_clusters=len(manifest.priors)),
        ),
        expert=ExpertConfig(num_experts=len(manifest.experts)),
    )


def refuse_paths(manifest: EnsembleManifest) -> None:
    """Refuse encoders that load a local path or hub model named by the artifacts, perhaps a stranger's.

    Raises:
        UserError: an encoder's params name a path or a model of the hub.
    """
    name, meta = next(iter(manifest.metas.items()))
    for encoder in filter(None, (meta.image_encoder, meta.caption_encoder)):
        params = json.dumps(encoder.params, ensure_ascii=False)
        if re.search(r'[/\\]|"path":', params):
            raise UserError(
                f"{manifest.folders[name] / MEMBER_FILE}: the encoder {encoder.name!r} would load what {params} "
                "names; if you trust the author, add --allow-paths or allow_paths=True"
            )


def load_settings(place: str | Path, overrides: Sequence[str] = (), *, allow_paths: bool = False) -> Experiment:
    """Load the experiment of a file, a run folder, a saved ensemble, or a URL of one of the last two, for sampling.

    A URL is downloaded. For a saved ensemble, or a run at a URL, the experiment holds only what sampling needs.

    Args:
        place: where it is.
        overrides: ``key=value`` pairs.
        allow_paths: whether to skip ``refuse_paths``.

    Raises:
        UserError: as ``load_run``, ``refuse_changed`` or ``fetched``; or, for a saved ensemble, a key outside of
            ``island``, ``sample`` and ``evaluate``, ``sample.member``, or as ``refuse_paths``.
    """
    is_file = not remote.is_url(place) and not Path(place).is_dir()
    record = RunFolder(Path(place)).experiment
    if is_file or (record.exists() and str(place) not in DOWNLOADS):
        experiment = load_run(place if is_file else record, overrides)
        refuse_changed(experiment)
        return experiment

    folder = fetched(place)
    manifest = manifest_with_about(folder, partial=True)
    if not allow_paths:
        refuse_paths(manifest)

    experiment = experiment_of(manifest)
    experiment.run_dir = str(folder)
    for text in overrides:
        source = f"{place} with {text!r}"
        change = read_override(text, str(place))
        (section,) = change
        if section not in _FREE:
            raise UserError(f"{source}: a saved ensemble takes only {', '.join(_FREE)}; leave it out")

        checks.check(OmegaConf.to_container(change), Experiment, "", source, references=False)
        setattr(experiment, section, changed(getattr(experiment, section), change[section]))

    if experiment.sample.member is not None:
        raise UserError(f"{place}: key 'sample.member': a saved ensemble is sampled as a whole; leave it out")

    check_experiment(experiment, place, overrides, sampling_only=True)
    return experiment


def resolve(
    experiment: Experiment, overrides: Sequence[str] = (), source: str = "sample", **arguments: Any
) -> Experiment:
    """Give an experiment the arguments of one call, and check its settings of sampling.

    Another strategy keeps only the params that an override names, and gets its own solver if none is given; another
    solver keeps no params.

    Args:
        experiment: from ``load_settings``, overrides included.
        overrides: those of the experiment.
        source: begins error lines.
        arguments: ``seed`` and keys of the section ``sample``; None is the experiment's.

    Returns:
        A changed copy.

    Raises:
        UserError: an unknown key, a value out of range, or settings that do not go together.
    """
    plain = {}
    for key, value in arguments.items():
        plain[key] = value.item() if isinstance(value, np.generic) else value

    arguments = {}
    for key, value in plain.items():
        if value is not None:
            arguments[key] = value

    seed = arguments.pop("seed", experiment.seed)
    before = experiment.sample
    known = []
    for field in fields(SampleConfig):
        if field.name != "member":
            known.append(field.name)

    if unknown := arguments.keys() - known:
        raise UserError(f"{source}: no setting {min(unknown)!r}; known: {', '.join(known)}")

    sample = replace(before, **arguments)
    given = {text.partition("=")[0] for text in overrides} | {f"sample.{key}" for key in arguments}
    if sample.strategy != before.strategy and "strategy_params" not in arguments:
        sample.strategy_params = {
            key: value for key, value in before.strategy_params.items() if f"sample.strategy_params.{key}" in given
        }

    if sample.solver != before.solver and "solver_params" not in arguments:
        sample.solver_params = {}

    resolved = replace(experiment, sample=sample, seed=seed)
    check_experiment(resolved, source, overrides, sampling_only=True)
    if "strategy" in arguments and "sample.solver" not in given:
        solvers = strategy_of(sample).solvers
        if solvers and sample.solver not in solvers:
            resolved.sample = replace(sample, solver=solvers[0], solver_params={})

    check_strategy(resolved, source, overrides)
    return resolved


def _refuse_link(path: Path) -> None:
    try:
        check_file(path)
    except ValueError as error:
        raise UserError(f"{path}: {error}; {REMEDY}") from None


def save_ensemble(ensemble: EnsembleManifest, out: Path, licence: str | None = None) -> None:
    """Write a saved ensemble; ``out`` appears whole or not at all.

    Args:
        ensemble: from ``manifest_with_about``, or changed by ``added``, ``removed`` or ``replaced``.
        out: new folder.
        licence: licence of the weights; None keeps the one stated before.

    Raises:
        UserError: ``out`` exists, an artifact is damaged, or members do not belong together.
    """
    if licence is None:
        about = ensemble.description
    else:
        about = replace(ensemble.description, licence=licence)

    bases = Bases(ensemble.folders.values())
    with atomic_folder(out, is_new=True) as temporary:
        for name, folder in ensemble.folders.items():
            check_recorded(folder / WEIGHTS_FILE, ensemble.metas[name].model_sha256, REMEDY)
            (temporary / name).mkdir()
            for file in _FILES:
                if (folder / file).exists():
                    _refuse_link(folder / file)
                    shutil.copyfile(folder / file, temporary / name / file)

            if (sha256 := ensemble.metas[name].base_sha256) is not None:
                base = bases.file(ensemble.metas[name], str(folder))
                copy = base_file(temporary, ensemble.metas[name])
                if not copy.exists():
                    check_recorded(base, sha256, REMEDY)
                    copy.parent.mkdir(parents=True)
                    shutil.copyfile(base, copy)

        folders = {name: temporary / name for name in ensemble.folders}
        is_changed = bool(ensemble.changed or ensemble.lost)
        write_manifest(temporary, replace(ensemble, folders=folders, about=about, changed=is_changed))
        saved = read_ensemble(temporary / ENSEMBLE_FILE)
        card = TEMPLATES.get_template("model_card.md.j2").render(
            vars(saved), shares=saved.shares, condition=saved.meta.condition.kind
        )
        (temporary / "README.md").write_text(card, encoding="utf-8")
