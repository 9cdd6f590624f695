"""Saved ensembles: a folder with ``ensemble.json``, one artifact folder per member and a model card."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from fsspec.core import url_to_fs
from jinja2 import Environment, PackageLoader, StrictUndefined

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import DOWNLOADS, UserError, first_line
from ddm_lightning.core.files import atomic_folder, inside, read_json
from ddm_lightning.core.weights import check_recorded
from ddm_lightning.ensemble.manifest import About, EnsembleManifest, read_ensemble, write_manifest
from ddm_lightning.members.artifact import REMEDY, WEIGHTS_FILE
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE, RunFolder, load_run
from ddm_lightning.shards.manifest import ClusterSamples, Manifest, manifest_path

CARD_FILE = "README.md"
_TEMPLATES = Environment(
    loader=PackageLoader(__package__), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
)


def fetched(address: str | Path) -> Path:
    """Folder of an ensemble: ``address`` itself, or a download of the URL, kept until the program ends.

    Downloads ``ensemble.json``, then only files that it and the layout of artifacts and run folders name.

    Raises:
        UserError: the URL cannot be read, the folder does not exist, or a path leaves it.
    """
    url = str(address)
    if "://" not in url:
        if not (local := Path(url).expanduser()).is_dir():
            remedy = "give one, or a URL (on the Hugging Face hub: hf://owner/name)"
            raise UserError(f"{url}: is not a folder here; {remedy}")
        return local
    folder = Path(tempfile.mkdtemp(prefix="ddm_lightning-")).resolve()
    DOWNLOADS[str(folder)] = url.rstrip("/")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        filesystem, root = url_to_fs(url)

        def fetch(relative: str) -> bool:
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                filesystem.get_file(f"{root.rstrip('/')}/{relative}", str(target))
            except FileNotFoundError:
                target.unlink(missing_ok=True)  # hf:// leaves an empty one
                return False
            return True

        if not fetch(ENSEMBLE_FILE):
            raise UserError(f"{url}: holds no {ENSEMBLE_FILE}; give the folder of a run or of a saved ensemble")
        _fetch_members(folder, fetch)
    except UserError:
        raise
    except Exception as error:  # each storage service raises its own
        raise UserError(f"{url}: cannot be read: {first_line(error)}; fix the address or the access") from error
    return folder


def _fetch_members(folder: Path, fetch: Callable[[str], bool]) -> None:
    path = folder / ENSEMBLE_FILE
    document = read_json(path, "the ensemble's manifest", "fetch it again")
    # What is not of this form is refused by ``read_ensemble``.
    members = document.get("members") if isinstance(document, dict) else None
    entries = [entry for entry in members if isinstance(entry, dict)] if isinstance(members, list) else []
    for relative in {entry["path"] for entry in entries if isinstance(entry.get("path"), str)}:
        inner = inside(folder, relative, path).relative_to(folder.resolve()).as_posix()
        if fetch(f"{inner}/{MEMBER_FILE}"):
            fetch(f"{inner}/{WEIGHTS_FILE}")
    if isinstance(document, dict) and not document.get("about"):
        for needed in (RunFolder(folder).experiment, manifest_path(folder)):
            fetch(needed.relative_to(folder).as_posix())


def is_saved(folder: Path) -> bool:
    """Whether to use ``folder`` as a saved ensemble: it holds no run, or is a download."""
    run = RunFolder(folder)
    return run.ensemble.exists() and (str(folder) in DOWNLOADS or not run.experiment.exists())


def data_of(folder: Path) -> Manifest:
    """Read the manifest of a run's shards; for a saved ensemble, describe its data without shards.

    Raises:
        UserError: as ``Manifest.read`` or ``open_ensemble``.
    """
    if not is_saved(folder):
        return Manifest.read(folder)
    ensemble = open_ensemble(folder, partial=True, quiet=True)
    about, meta = ensemble.about, next(iter(ensemble.metas.values()))
    assert about is not None
    kind, size = meta.condition["kind"], meta.condition["size"]
    return Manifest(
        source={},
        attribution=about.credit,
        images={},
        image_encoder=meta.image_encoder,
        stores="x_0",
        x_shape=meta.x_shape,
        normalisation=meta.normalisation,
        statistics={},
        caption_encoder=meta.caption_encoder,
        text_size=size if kind == "text" else 0,
        token_shape=(meta.condition["length"], size) if kind == "tokens" else None,
        columns={},
        num_classes=size if kind == "class" else 0,
        features={},
        provenance={},
        num_read=0,
        broken={},
        num_samples=about.num_images,
        num_without_caption=0,
        clusters=(ClusterSamples(0, 0),) * len(ensemble.priors),
        priors=ensemble.priors,
        seed=about.seed,
        index_sha256={},
        partition_sha256=ensemble.partition_sha256,
        versions={},
        class_names=about.class_names,
    )


def open_ensemble(
    folder: Path, experiment: Experiment | None = None, *, partial: bool = False, quiet: bool = False
) -> EnsembleManifest:
    """Read the ensemble of a run folder or of a saved ensemble.

    Args:
        folder: holds ``ensemble.json``.
        experiment: the experiment with other defaults of sampling; None is the recorded one.
        partial, quiet: as in ``read_ensemble``.

    Returns:
        The manifest, ``about`` included.

    Raises:
        UserError: a file is missing, damaged or of other data.
    """
    ensemble = read_ensemble(folder / ENSEMBLE_FILE, partial=partial, quiet=quiet)
    about = ensemble.about
    if about is None:
        experiment, prepared = experiment or load_run(RunFolder(folder).experiment), Manifest.read(folder)
        if prepared.partition_sha256 != ensemble.partition_sha256:
            problem = "the experts were trained on other data; copy the manifest from where they were trained"
            raise UserError(f"{manifest_path(folder)}: {problem}")
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
    condition, names = next(iter(ensemble.metas.values())).condition, about.class_names
    if condition["kind"] == "class" and names and len(names) != condition["size"]:
        raise UserError(f"{folder / ENSEMBLE_FILE}: {len(names)} class_names for {condition['size']} classes; fix them")
    num_images = max(1, round(about.num_images * (1 - sum(ensemble.lost.values()))))
    return replace(ensemble, about=replace(about, num_images=num_images))


def save_ensemble(ensemble: EnsembleManifest, out: Path, licence: str | None = None) -> None:
    """Write a saved ensemble; ``out`` appears whole or not at all.

    Args:
        ensemble: from ``open_ensemble`` or ``changes``.
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
    condition = next(iter(ensemble.metas.values())).condition["kind"]
    return _TEMPLATES.get_template("model_card.md.j2").render(vars(ensemble), shares=shares, condition=condition)
