"""The Python API: a trained ensemble from a folder or URL, to sample, save and export."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from omegaconf import OmegaConf
from PIL import Image

from ddm_lightning.config.experiment import Experiment, PluginConfig, SampleConfig
from ddm_lightning.config.load import read_override
from ddm_lightning.config.merge import merge
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core import checks
from ddm_lightning.core.devices import check_devices, configure_cuda, device_of
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_write_text
from ddm_lightning.core.registry import require
from ddm_lightning.ensemble.load import load_listed
from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.ensemble.routing import strategy_of, with_suited_solver
from ddm_lightning.ensemble.trace import Trace
from ddm_lightning.members.run_folder import MEMBER_FILE, RunFolder, load_run
from ddm_lightning.use.samples import row_conditions, sample_images
from ddm_lightning.use.saved import fetched, open_ensemble, save_ensemble

# Sections that may be overridden for a saved ensemble.
_FREE = ("island", "sample", "evaluate")
_PIPELINE = '''"""Code of this folder for diffusers: the class is part of the installed package ddm_lightning."""

from ddm_lightning.use.diffusers_pipeline import DecentralizedPipeline  # noqa: F401
'''


class DecentralizedEnsemble:
    """Experts, router, caption encoder and image decoder, ready to sample.

    Args:
        manifest: from ``open_ensemble``.
        device: where to sample.
        resident_experts: experts on the device at once; None is all.

    Raises:
        UserError: an artifact is damaged or unusable.
    """

    def __init__(
        self, manifest: EnsembleManifest, device: torch.device | str, resident_experts: int | None = None
    ) -> None:
        assert manifest.about is not None
        self.manifest, self.about, self.resident_experts = manifest, manifest.about, resident_experts
        self.to(device)

    def __repr__(self) -> str:
        meta = self.loaded.meta
        return (
            f"{type(self).__name__}({self.about.name!r}, members={list(self.manifest.folders)}, "
            f"condition={meta.condition['kind']!r}, x_shape={meta.x_shape})"
        )

    @classmethod
    def from_pretrained(
        cls,
        folder_or_url: str | Path,
        device: str | None = None,
        *,
        resident_experts: int | None = None,
        allow_paths: bool = False,
    ) -> DecentralizedEnsemble:
        """Load an ensemble. An expert whose artifact is missing is left out, with a note on stderr.

        Args:
            folder_or_url: run folder (``experiment.yaml``, ``ensemble.json``, ``prepared/manifest.json`` and the
                artifacts), saved ensemble, or a URL of one of them that fsspec reads, such as ``hf://owner/name`` for
                a repository of the Hugging Face hub; a URL is downloaded first.
            device: where to sample, such as ``"cuda"``; None is a GPU if there is one.
            resident_experts: experts on the device at once, at least 2, if it is too small for all; the others wait
                in the host's memory or on disk. None is all.
            allow_paths: whether encoders may read a path, or a model of the hub, that the ensemble names. A local run
                folder's own encoders always may.

        Raises:
            UserError: a file is missing, damaged or of other data, or leads out of the folder; no such device,
                ``resident_experts`` below 2, or as ``refuse_paths``.
        """
        check_devices("auto" if device is None else {"cuda": "gpu"}.get(torch.device(device).type, "cpu"), 1)
        if resident_experts is not None and resident_experts < 2:
            raise UserError(f"resident_experts = {resident_experts}: one computes while one loads; give at least 2")
        folder = fetched(folder_or_url)
        manifest, record = open_ensemble(folder, partial=True), RunFolder(folder).experiment
        own = load_run(record) if "://" not in str(folder_or_url) and record.exists() else None
        refuse_paths(manifest, own, allow_paths)
        return cls(manifest, device or device_of("auto"), resident_experts)

    def save_pretrained(self, folder: str | Path, licence: str | None = None) -> None:
        """Write a folder that ``from_pretrained`` loads: ``ensemble.json``, artifacts and a model card.

        Args:
            folder: a new folder.
            licence: licence of the weights, for the model card.

        Raises:
            UserError: the folder exists, or an artifact has been damaged.
        """
        save_ensemble(self.manifest, Path(folder), licence)

    def push_to_hub(self, repo_id: str, licence: str | None = None, **options: Any) -> str:
        """Upload what ``save_pretrained`` writes to a repository of the Hugging Face hub; needs huggingface_hub.

        Args:
            repo_id: ``owner/name``; created if it is missing.
            licence: as in ``save_pretrained``.
            options: further arguments of ``HfApi.create_repo``, such as ``private=True`` and ``token="hf_…"``.

        Returns:
            URL of the repository, to load with ``from_pretrained("hf://owner/name")``.

        Raises:
            UserError: as ``save_pretrained``, or the hub refuses or cannot be reached.
        """
        require("push_to_hub", "huggingface_hub", extra="latents")
        from huggingface_hub import HfApi

        with TemporaryDirectory() as scratch:
            folder, hub = Path(scratch) / "ensemble", HfApi(token=options.pop("token", None))
            self.save_pretrained(folder, licence)
            try:
                url = hub.create_repo(repo_id, exist_ok=True, **options)
                hub.upload_folder(repo_id=repo_id, folder_path=folder)
            except (OSError, ValueError) as error:
                problem = f"cannot be uploaded ({first_line(error)})"
                raise UserError(f"{repo_id}: {problem}; check name and network, or run: hf auth login") from None
        return str(url)

    def to(self, device: torch.device | str) -> DecentralizedEnsemble:
        """Load all networks onto another device."""
        if torch.device(device).type == "cuda":
            configure_cuda()
        self.loaded = load_listed(self.manifest, device, self.resident_experts)
        return self

    def sample(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        classes: Sequence[str | int] | None = None,
        strategy: str | None = None,
        num: int | None = None,
        seed: int | None = None,
        trace: Trace | None = None,
        factors: Sequence[float] | None = None,
        **settings: Any,
    ) -> list[Image.Image]:
        """Generate the images that the command ``sample`` writes with the same options.

        Args:
            prompts: texts. None, without classes, is the experiment's.
            classes: names or numbers, for an experiment conditioned on classes. None is all.
            strategy: routing strategy; None is the experiment's.
            num: images per prompt or class; None is the experiment's.
            seed: seed of the noise; None is the experiment's.
            trace: keeps the sampling trajectory, such as the weights of the experts.
            factors: multiply the experts' weights, one per expert; 0 switches it off. None leaves them as they are.
            settings: other keys of the experiment's ``sample`` section, such as ``num_steps=20``.

        Returns:
            ``num`` images of the first prompt, then of the second, and so on.

        Raises:
            UserError: an empty prompt or list, an unknown class, strategy or setting, or a value out of range.
        """
        given = None if prompts is None else [prompts] if isinstance(prompts, str) else list(prompts)
        shown = None if classes is None else list(map(str, classes))
        if [] in (given, shown) or not all(isinstance(prompt, str) for prompt in given or ()):
            raise UserError("sample: give prompts (strings) or classes, or leave both out for the experiment's")
        known = [field.name for field in fields(SampleConfig) if field.name != "member"]  # this is the ensemble
        if unknown := set(settings) - set(known):
            raise UserError(f"sample: no setting {min(unknown)!r}; known: {', '.join(known)}")
        chosen = SampleConfig(**self.about.sample)
        if strategy not in (None, chosen.strategy):
            chosen = replace(chosen, strategy=strategy, strategy_params={})
        if num is not None:
            settings["num_per_prompt"] = num
        if settings.get("solver", chosen.solver) != chosen.solver:
            settings.setdefault("solver_params", {})
        chosen = replace(chosen, **settings)
        experiment = experiment_of(self.manifest, chosen, self.about.seed if seed is None else seed)
        check_experiment(experiment, "sample", sampling_only=True)
        if "solver" not in settings:
            experiment.sample = chosen = with_suited_solver(chosen)
        loaded = self.loaded
        if factors is not None:
            loaded = replace(loaded, ensemble=loaded.ensemble.reweighted(factors))
        strategy_of(chosen).check_num_clusters(loaded.ensemble.num_clusters)
        given = given or ([] if shown else chosen.prompts)
        num_classes = self.loaded.meta.condition["size"]
        rows = row_conditions(given, shown or [], experiment, self.about.class_names, num_classes)
        images = sample_images(loaded, experiment, rows, chosen.num_per_prompt, trace=trace)
        return [Image.fromarray(image) for _, _, image in images]


def experiment_of(manifest: EnsembleManifest, sample: SampleConfig, seed: int) -> Experiment:
    """Build the part of an experiment that sampling from an ensemble needs."""
    assert manifest.about is not None
    meta, found = next(iter(manifest.metas.values())), Experiment(name=manifest.about.name, sample=sample, seed=seed)
    found.condition.kind = meta.condition["kind"]
    found.prepare.image_encoder = PluginConfig(**meta.image_encoder)
    found.prepare.caption_encoder = PluginConfig(**meta.caption_encoder) if meta.caption_encoder else None
    found.prepare.partition.num_clusters = len(manifest.experts)
    return found


def load_saved(path: str, overrides: Sequence[str], allow_paths: bool) -> Experiment:
    """Load the part of an experiment that the commands need, from a saved ensemble or a run at a URL.

    Args:
        path: folder of a saved ensemble, or the URL of one or of a run folder, which is downloaded.
        overrides: ``key=value`` pairs of the sections in ``_FREE``.
        allow_paths: as in ``refuse_paths``.

    Raises:
        UserError: a missing or damaged ensemble, an invalid setting, ``sample.member``, or as ``refuse_paths``.
    """
    folder = fetched(path)
    manifest = open_ensemble(folder, partial=True, quiet=True)
    refuse_paths(manifest, None, allow_paths)
    assert manifest.about is not None
    sample = replace(SampleConfig(**manifest.about.sample), member=None)
    experiment = experiment_of(manifest, sample, manifest.about.seed)
    experiment.run_dir = str(folder)
    for text in overrides:
        change = read_override(text, path)
        (section,) = change
        if section not in _FREE:
            raise UserError(f"{path} with {text!r}: a saved ensemble takes only {', '.join(_FREE)}; leave it out")
        checks.check(OmegaConf.to_container(change), Experiment, "", f"{path} with {text!r}", references=False)
        merged = merge(OmegaConf.structured(getattr(experiment, section)), change[section])
        setattr(experiment, section, OmegaConf.to_object(merged))
    if experiment.sample.member is not None:
        raise UserError(f"{path}: key 'sample.member': a saved ensemble is sampled as a whole; leave it out")
    check_experiment(experiment, path, overrides, sampling_only=True)
    return experiment


def refuse_paths(manifest: EnsembleManifest, experiment: Experiment | None, allow_paths: bool) -> None:
    """Refuse encoders that load a local path or hub model that only the artifacts name.

    Args:
        manifest: the ensemble, perhaps a stranger's.
        experiment: the user's own, whose encoders are allowed.
        allow_paths: whether the user allows every encoder.

    Raises:
        UserError: an encoder's params name a path or a model of the hub.
    """
    name, meta = next(iter(manifest.metas.items()))
    own = [] if experiment is None else [experiment.prepare.image_encoder, experiment.prepare.caption_encoder]
    for encoder in filter(None, (meta.image_encoder, meta.caption_encoder)):
        params = json.dumps(encoder["params"], ensure_ascii=False)
        if not allow_paths and PluginConfig(**encoder) not in own and re.search(r'[/\\]|"path":', params):
            problem = f"the encoder {encoder['name']!r} would load what {params} names"
            place = manifest.folders[name] / MEMBER_FILE
            raise UserError(f"{place}: {problem}; if you trust the author, add --allow-paths or allow_paths=True")


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
