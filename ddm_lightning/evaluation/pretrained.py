"""The Python API: a trained ensemble from a folder or URL, to sample, save and export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ddm_lightning.config.experiment import Experiment, PluginConfig, SampleConfig
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core.devices import check_devices, configure_cuda, device_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_text
from ddm_lightning.ensemble.load import load_listed
from ddm_lightning.ensemble.routing import strategy_of, with_suited_solver
from ddm_lightning.ensemble.saved import fetched, open_ensemble, save_ensemble
from ddm_lightning.ensemble.trace import Trace
from ddm_lightning.evaluation.samples import row_conditions, sample_images
from ddm_lightning.members.assembly import EnsembleManifest

_PIPELINE = '''"""Code of this folder for diffusers: the class is part of the installed package ddm_lightning."""

from ddm_lightning.evaluation.diffusers_pipeline import DecentralizedPipeline  # noqa: F401
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

    @classmethod
    def from_pretrained(
        cls, folder_or_url: str | Path, device: str | None = None, *, resident_experts: int | None = None
    ) -> DecentralizedEnsemble:
        """Load an ensemble. An expert whose artifact is missing is left out, with a note on stderr.

        Args:
            folder_or_url: run folder (``experiment.yaml``, ``ensemble.json``, ``prepared/manifest.json`` and the
                artifacts), saved ensemble, or a URL of one of them that fsspec reads; a URL is downloaded first.
            device: where to sample, such as ``"cuda"``; None is a GPU if there is one.
            resident_experts: experts on the device at once, at least 2, if it is too small for all; the others wait
                in the host's memory or on disk. None is all.

        Raises:
            UserError: a file is missing, damaged or of other data, or leads out of the folder; no such device, or
                ``resident_experts`` below 2.
        """
        check_devices("auto" if device is None else {"cuda": "gpu"}.get(torch.device(device).type, "cpu"), 1)
        if resident_experts is not None and resident_experts < 2:
            raise UserError(f"resident_experts = {resident_experts}: one computes while one loads; give at least 2")
        manifest = open_ensemble(fetched(folder_or_url), partial=True)
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

    def to(self, device: torch.device | str) -> DecentralizedEnsemble:
        """Load all networks onto another device."""
        if torch.device(device).type == "cuda":
            configure_cuda()
        self.loaded = load_listed(self.manifest, device, self.resident_experts)
        return self

    def sample(
        self,
        prompts: Sequence[str] = (),
        *,
        classes: Sequence[str | int] = (),
        strategy: str | None = None,
        num: int | None = None,
        seed: int | None = None,
        trace: Trace | None = None,
        factors: Sequence[float] | None = None,
        **settings: Any,
    ) -> list[Image.Image]:
        """Generate the images that the command ``sample`` writes with the same options.

        Args:
            prompts: texts; without prompts and classes, the experiment's.
            classes: names or numbers, for an experiment conditioned on classes.
            strategy: routing strategy; None is the experiment's.
            num: images per prompt or class; None is the experiment's.
            seed: seed of the noise; None is the experiment's.
            trace: keeps the sampling trajectory, such as the weights of the experts.
            factors: multiply the experts' weights, one per expert; 0 switches it off. None leaves them as they are.
            settings: other keys of the experiment's ``sample`` section, such as ``num_steps=20``.

        Returns:
            ``num`` images of the first prompt, then of the second, and so on.

        Raises:
            UserError: an empty prompt, an unknown class, strategy or setting, or a value out of range.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(map(str, prompts))
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
        experiment = self._experiment(chosen, self.about.seed if seed is None else seed)
        check_experiment(experiment, "sample", sampling_only=True)
        if "solver" not in settings:
            experiment.sample = chosen = with_suited_solver(chosen)
        loaded = self.loaded
        if factors is not None:
            loaded = replace(loaded, ensemble=loaded.ensemble.reweighted(factors))
        strategy_of(chosen).check_num_clusters(loaded.ensemble.num_clusters)
        shown = prompts or ([] if classes else chosen.prompts)
        num_classes = self.loaded.meta.condition["size"]
        rows = row_conditions(shown, list(map(str, classes)), experiment, self.about.class_names, num_classes)
        images = sample_images(loaded, experiment, rows, chosen.num_per_prompt, trace=trace)
        return [Image.fromarray(image) for _, _, image in images]

    def _experiment(self, chosen: SampleConfig, seed: int) -> Experiment:
        """The experiment as far as sampling needs it."""
        meta, found = self.loaded.meta, Experiment(name=self.about.name, sample=chosen, seed=seed)
        found.condition.kind = meta.condition["kind"]
        found.prepare.image_encoder = PluginConfig(**meta.image_encoder)
        found.prepare.caption_encoder = PluginConfig(**meta.caption_encoder) if meta.caption_encoder else None
        return found


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
