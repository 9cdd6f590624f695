"""Saved ensembles: a folder with ``ensemble.json``, one artifact folder per member and a model card."""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from ddm_lightning.config.experiment import Experiment, PluginConfig, SampleConfig
from ddm_lightning.core import remote
from ddm_lightning.core.errors import DOWNLOADS, UserError, first_line
from ddm_lightning.core.files import atomic_folder, atomic_write_text, inside
from ddm_lightning.core.weights import check_recorded
from ddm_lightning.ensemble.manifest import (
    About,
    EnsembleManifest,
    read_document,
    read_ensemble,
    single,
    write_manifest,
)
from ddm_lightning.members.artifact import REMEDY, WEIGHTS_FILE
from ddm_lightning.members.roles import condition_spec
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE, RunFolder, load_run
from ddm_lightning.shards.manifest import Manifest, manifest_path

CARD_FILE = "README.md"
_PIPELINE = '''"""Code of this folder for diffusers: the class is part of the installed package ddm_lightning."""

from ddm_lightning.use.diffusers_pipeline import DecentralizedPipeline  # noqa: F401
'''
_TEMPLATES = Environment(
    loader=PackageLoader(__package__), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
)


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

    try:
        fetch(run.ensemble)
        document = read_document(run.ensemble)
        for relative in {entry["path"] for entry in document["members"]}:
            folder = inside(run.root, relative, run.ensemble)
            fetch(folder / MEMBER_FILE, folder / WEIGHTS_FILE)
        if document["about"] is None:
            fetch(run.experiment, manifest_path(run.root))
    except OSError as error:
        raise UserError(f"{url}: cannot be read: {first_line(error)}; fix the address or the access") from error
    return run.root


def manifest_with_about(
    folder: Path, experiment: Experiment | None = None, *, member: str | None = None, partial: bool = False
) -> EnsembleManifest:
    """Read the manifest of a run's or a saved ensemble, and fill in ``about``.

    Args:
        folder: holds ``ensemble.json``.
        experiment: gives the defaults of sampling; None is the recorded one.
        member: of a run, one member alone instead of the ensemble.
        partial: as in ``read_ensemble``.

    Returns:
        The manifest, ``about`` included.

    Raises:
        UserError: a file is missing, damaged or of other data.
    """
    run = RunFolder(folder)
    ensemble = single(run.artifact(member)) if member else read_ensemble(run.ensemble, partial=partial)
    about, meta = ensemble.about, ensemble.meta
    if about is None:
        experiment, prepared = experiment or load_run(run.experiment), Manifest.read(folder)
        condition = condition_spec(experiment, prepared).to_dict()
        known = (meta.partition_sha256, meta.x_shape, meta.condition)
        if known != (prepared.partition_sha256, prepared.x_shape, condition):
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
            sample=asdict(experiment.sample),
        )
    elif experiment is not None:
        about = replace(about, seed=experiment.seed, sample=asdict(experiment.sample))
    names, num_classes = about.class_names, meta.condition["size"]
    if meta.condition["kind"] == "class" and names and len(names) != num_classes:
        raise UserError(f"{run.ensemble}: {len(names)} class_names for {num_classes} classes; fix them")
    num_images = max(1, round(about.num_images * (1 - sum(ensemble.lost.values()))))
    return replace(ensemble, about=replace(about, num_images=num_images))


def experiment_of(manifest: EnsembleManifest) -> Experiment:
    """Build the part of an experiment that sampling from an ensemble needs."""
    assert manifest.about is not None
    about, meta = manifest.about, manifest.meta
    sample = replace(SampleConfig(**about.sample), member=None)
    experiment = Experiment(name=about.name, sample=sample, seed=about.seed)
    experiment.condition.kind = meta.condition["kind"]
    experiment.prepare.image_encoder = PluginConfig(**meta.image_encoder)
    experiment.prepare.caption_encoder = PluginConfig(**meta.caption_encoder) if meta.caption_encoder else None
    experiment.prepare.partition.num_clusters = len(manifest.experts)
    return experiment


def refuse_paths(manifest: EnsembleManifest) -> None:
    """Refuse encoders that load a local path or hub model that the artifacts, perhaps a stranger's, name.

    Raises:
        UserError: an encoder's params name a path or a model of the hub.
    """
    name, meta = next(iter(manifest.metas.items()))
    for encoder in filter(None, (meta.image_encoder, meta.caption_encoder)):
        params = json.dumps(encoder["params"], ensure_ascii=False)
        if re.search(r'[/\\]|"path":', params):
            problem = f"the encoder {encoder['name']!r} would load what {params} names"
            place = manifest.folders[name] / MEMBER_FILE
            raise UserError(f"{place}: {problem}; if you trust the author, add --allow-paths or allow_paths=True")


def save_ensemble(ensemble: EnsembleManifest, out: Path, licence: str | None = None) -> None:
    """Write a saved ensemble; ``out`` appears whole or not at all.

    Args:
        ensemble: from ``manifest_with_about`` or ``changes``.
        out: new folder.
        licence: licence of the weights; None keeps the one stated before.

    Raises:
        UserError: ``out`` exists, an artifact is damaged, or members do not belong together.
    """
    assert ensemble.about is not None
    if out.exists():
        raise UserError(f"{out}: exists already; give a new folder")
    for name, folder in ensemble.folders.items():
        check_recorded(folder / WEIGHTS_FILE, ensemble.metas[name].model_sha256, REMEDY)
    about = ensemble.about if licence is None else replace(ensemble.about, licence=licence)
    with atomic_folder(out) as temporary:
        for name, folder in ensemble.folders.items():
            (temporary / name).mkdir()
            for file in (MEMBER_FILE, WEIGHTS_FILE):
                shutil.copyfile(folder / file, temporary / name / file)
        folders = {name: temporary / name for name in ensemble.folders}
        changed = ensemble.changed or bool(ensemble.lost)
        write_manifest(temporary, replace(ensemble, folders=folders, about=about, changed=changed))
        saved = read_ensemble(temporary / ENSEMBLE_FILE)
        (temporary / CARD_FILE).write_text(model_card(saved), encoding="utf-8")


def model_card(ensemble: EnsembleManifest) -> str:
    """Describe a saved ensemble in Markdown: use, members with hashes, partition, credit and licence."""
    shares = dict(zip(ensemble.experts, ensemble.priors, strict=True))
    condition = ensemble.meta.condition["kind"]
    return _TEMPLATES.get_template("model_card.md.j2").render(vars(ensemble), shares=shares, condition=condition)


def export_diffusers(manifest: EnsembleManifest, out: Path, licence: str | None = None) -> None:
    """Write a saved ensemble that ``diffusers`` loads, too.

    Use ``DiffusionPipeline.from_pretrained(out, custom_pipeline=out, trust_remote_code=True)``.

    Raises:
        UserError: as ``save_ensemble``.
    """
    save_ensemble(manifest, out, licence)
    atomic_write_text(out / "pipeline.py", _PIPELINE)
    index = {"_class_name": ["pipeline", "DecentralizedPipeline"]}
    atomic_write_text(out / "model_index.json", json.dumps(index, indent=2) + "\n")
