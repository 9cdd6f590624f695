"""The manifest of a run's or a saved ensemble, and how ensembles are saved.

A saved ensemble is a folder with ``ensemble.json``, one artifact folder per member and a model card.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddm_lightning.config.experiment import Experiment, SampleConfig
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_folder, check_file
from ddm_lightning.core.registry import require
from ddm_lightning.core.weights import check_recorded
from ddm_lightning.ensemble.manifest import About, EnsembleManifest, read_ensemble, single, write_manifest
from ddm_lightning.members.load import Bases
from ddm_lightning.members.member import condition_spec
from ddm_lightning.members.meta import REMEDY, WEIGHTS_FILE, base_file
from ddm_lightning.members.roles import all_members, ensemble_members
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE, SIGNATURE, STATEMENT, RunFolder, load_run
from ddm_lightning.members.signatures import PREPARE, check_signature
from ddm_lightning.shards.manifest import Manifest, manifest_path

TEMPLATES = Environment(
    loader=PackageLoader(__package__), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
)
"""Model cards."""
ARTIFACT_FILES = (MEMBER_FILE, WEIGHTS_FILE, STATEMENT, SIGNATURE)
"""Files of an artifact; those of a signature need not exist."""


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
        _refuse_unfinished(run, experiment, member)
    if member:
        ensemble = single(run.artifact(member))
    else:
        ensemble = read_ensemble(run.ensemble, partial=partial)

    about = ensemble.about
    if experiment is not None:
        for name, meta in ensemble.metas.items():
            check_signature(meta.member, ensemble.folders[name], experiment)

        if about is None:
            check_signature(PREPARE, manifest_path(folder), experiment)
        else:
            about = replace(about, seed=experiment.seed, sample=experiment.sample)

    about = about or _about_of_run(run, ensemble, experiment or load_run(run.experiment))
    num_names = len(about.class_names or ())
    condition = ensemble.meta.condition
    if condition.kind == "class" and num_names not in (0, condition.size):
        raise UserError(f"{run.ensemble}: {num_names} class_names for {condition.size} classes; fix them")

    num_images = max(1, round(about.num_images * ensemble.share))
    return replace(ensemble, about=replace(about, num_images=num_images))


def artifact_in(folder: Path) -> Path | None:
    """The artifact in a folder that is one, or in a member's folder; None for an ensemble."""
    for place in (folder, folder / "artifact"):
        if (place / MEMBER_FILE).exists():
            return place

    return None


def single_with_about(artifact: Path) -> tuple[EnsembleManifest, Experiment | None]:
    """Manifest of one artifact as an ensemble of one, and the experiment of the run that it lies in, if any.

    Settings of sampling are those of the run; without one, the defaults.

    Raises:
        UserError: as ``single`` or ``manifest_with_about``.
    """
    member = artifact.absolute().parent
    run = RunFolder(member.parent.parent)
    if run.experiment.exists() and run.artifact(member.name) == artifact.absolute():
        experiment = load_run(run.experiment)
        return manifest_with_about(run.root, experiment, member=member.name), experiment

    alone = single(artifact)
    about = About(name=alone.meta.member, credit="", class_names=None, num_images=1, seed=0, sample=SampleConfig())
    return replace(alone, about=about), None


def _refuse_unfinished(run: RunFolder, experiment: Experiment, member: str | None) -> None:
    path = run.sampled_from(member)
    if path.exists():
        return

    known = all_members(experiment)
    if member is not None and member not in known:
        raise UserError(f"sample.member={member}: unknown member; name one of {', '.join(known)}")

    missing = [member] if member else [name for name in ensemble_members(experiment) if not run.has_artifact(name)]
    if not missing:
        raise UserError(f"{path}: is missing, although all members are finished; fit writes it again")

    raise UserError(
        f"{path}: does not exist yet, because these members are not finished: {', '.join(missing)}; fit them"
    )


def _about_of_run(run: RunFolder, ensemble: EnsembleManifest, experiment: Experiment) -> About:
    prepared = Manifest.read(run.root)
    meta = ensemble.meta
    wanted = (prepared.partition_sha256, prepared.x_shape, condition_spec(experiment, prepared))
    if (meta.partition_sha256, meta.x_shape, meta.condition) != wanted:
        raise UserError(
            f"{manifest_path(run.root)}: the experts were trained on other data ({meta.x_shape}, {meta.condition}); "
            "copy the manifest from where they were trained"
        )

    return About(
        name=experiment.name,
        credit=prepared.attribution,
        class_names=prepared.class_names,
        num_images=prepared.num_samples,
        seed=experiment.seed,
        sample=experiment.sample,
    )


def save_ensemble(ensemble: EnsembleManifest, out: Path, licence: str | None = None) -> None:
    """Write a saved ensemble; ``out`` appears whole or not at all.

    Args:
        ensemble: from ``manifest_with_about``, or changed by ``added``, ``removed`` or ``replaced``.
        out: new folder.
        licence: licence of the weights; None keeps the one stated before.

    Raises:
        UserError: ``out`` exists, an artifact is damaged, or members do not belong together.
    """
    about = ensemble.description
    if licence is not None:
        about = replace(about, licence=licence)

    bases = Bases(ensemble.folders.values())
    folders = {}
    with atomic_folder(out, is_new=True) as temporary:
        for name, folder in ensemble.folders.items():
            meta = ensemble.metas[name]
            check_recorded(folder / WEIGHTS_FILE, meta.model_sha256, REMEDY)
            folders[name] = temporary / name
            _copy_artifact(folder, folders[name])
            if meta.base_sha256 is not None:
                base = bases.file(meta, str(folder))
                copy = base_file(temporary, meta)
                if not copy.exists():
                    check_recorded(base, meta.base_sha256, REMEDY)
                    copy.parent.mkdir(parents=True)
                    shutil.copyfile(base, copy)

        is_changed = bool(ensemble.changed or ensemble.lost)
        write_manifest(temporary, replace(ensemble, folders=folders, about=about, changed=is_changed))
        saved = read_ensemble(temporary / ENSEMBLE_FILE)
        template = TEMPLATES.get_template("model_card.md.j2")
        card = template.render(vars(saved), shares=saved.shares, condition=saved.meta.condition.kind)
        (temporary / "README.md").write_text(card, encoding="utf-8")


def _copy_artifact(folder: Path, copy: Path) -> None:
    copy.mkdir()
    for name in ARTIFACT_FILES:
        path = folder / name
        if path.exists():
            try:
                check_file(path)
            except ValueError as error:
                raise UserError(f"{path}: {error}; {REMEDY}") from None

            shutil.copyfile(path, copy / name)


def push_to_hub(ensemble: EnsembleManifest, repo_id: str, licence: str | None, options: dict[str, Any]) -> str:
    """Upload a saved ensemble to the Hugging Face hub; see ``DecentralizedEnsemble.push_to_hub``."""
    require("push_to_hub", "huggingface_hub", extra="latents")
    from huggingface_hub import HfApi

    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "ensemble"
        hub = HfApi(token=options.pop("token", None))
        save_ensemble(ensemble, folder, licence)
        try:
            url = hub.create_repo(repo_id, exist_ok=True, **options)
            hub.upload_folder(repo_id=repo_id, folder_path=folder)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{repo_id}: cannot be uploaded ({first_line(error)}); check name and network, or run: hf auth login"
            ) from None

    return str(url)
