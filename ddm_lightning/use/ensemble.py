"""The Python API: a trained ensemble from a folder or URL, to sample, save and export."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ddm_lightning.config.experiment import Experiment, PluginConfig
from ddm_lightning.core.devices import check_devices, configure_cuda, device_of, own_defaults
from ddm_lightning.core.errors import DOWNLOADS, UserError, first_line, note
from ddm_lightning.core.registry import CAPTION_ENCODERS, IMAGE_ENCODERS, Registry, require
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import About, EnsembleManifest
from ddm_lightning.ensemble.routing import Key, Trace
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Cost, Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.artifact import REMEDY, ArtifactMeta
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE, RunFolder, load_run
from ddm_lightning.use.download import fetched
from ddm_lightning.use.saved import manifest_with_about, save_ensemble
from ddm_lightning.use.settings import refuse_paths, resolve

MAX_ROWS = 32
"""Largest number of rows in a grid."""
# Images computed at once; the number does not change them.
BATCH_SIZE = 64


class Row(NamedTuple):
    """A row of images."""

    label: str
    noise: str
    """First part of the keys of its noise."""
    condition: Condition | None = None
    repeats: int = 0
    """Number of earlier rows with the same ``noise``."""

    def key(self, index: int, num: int) -> Key:
        """Key of an image's noise in a row of ``num``; a repeated row continues the numbers of the earlier one."""
        return self.noise, self.repeats * num + index


def usable_device(device: torch.device | str) -> torch.device:
    """Check that torch can use a device.

    Raises:
        UserError: it cannot, or there is no device of this name.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(
            f"device {device!s}: torch cannot use it ({first_line(error)}); give cpu, or check CUDA_VISIBLE_DEVICES"
        ) from None


def listed(given: Any) -> list[Any]:
    """Return a list of one thing, of several, or of nothing if None is given."""
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given]

    return list(given)


@lru_cache(maxsize=2)  # some take seconds to load
def _built(registry: Registry, name: str, params: str) -> Any:
    return registry.build(name, json.loads(params))


def built_encoder(registry: Registry, plugin: PluginConfig) -> Any:
    """Build an encoder, or take the one built before with the same params."""
    return _built(registry, plugin.name, json.dumps(plugin.params))


def text_condition(texts: Sequence[str], meta: ArtifactMeta) -> Condition:
    """Encode ``texts`` as vectors, tokens or both with the caption encoder of the experts."""
    if meta.caption_encoder is None:
        raise UserError(f"{meta.member}: key 'caption_encoder' is null in {MEMBER_FILE}; {REMEDY}")

    encoder = built_encoder(CAPTION_ENCODERS, meta.caption_encoder)
    parts = []
    for kind in meta.condition.kind.split("+"):
        # An encoder may have only one of the two methods.
        if kind == "tokens":
            values = encoder.tokens(list(texts))
        else:
            values = encoder.vectors(list(texts))

        parts.append(torch.from_numpy(values))

    return Condition.of(*parts)


def _rows_of_prompts(prompts: Sequence[str], meta: ArtifactMeta) -> list[Row]:
    for prompt in prompts:
        if not prompt.strip():
            raise UserError("a prompt is empty; describe an image")
        if re.search(r"[\udc80-\udcff]", prompt):  # as Python reads other bytes
            raise UserError("a prompt is not UTF-8; set the terminal's encoding to it")

    condition = text_condition(prompts, meta)
    rows = []
    for row, prompt in enumerate(prompts):
        rows.append(Row(prompt, prompt, condition.rows(torch.tensor([row])), prompts[:row].count(prompt)))

    return rows


def _rows_of_classes(classes: Sequence[str | int], names: Sequence[Any]) -> list[Row]:
    numbers = range(len(names))
    chosen: list[int] = []
    rows = []
    for given in classes or numbers[:MAX_ROWS]:
        num_named = names.count(given)
        if num_named == 1:
            number = names.index(given)
        elif num_named == 0 and str(given) in map(str, numbers):
            number = int(given)
        else:
            problem = "several classes have this name" if num_named else "no such class"
            raise UserError(
                f"class {given!r}: {problem}; give a number from 0 to {numbers[-1]}, or a name such as "
                f"{', '.join(names[:5])}"
            )

        condition = Condition.of(torch.tensor([number]))
        rows.append(Row(names[number], f"class {number}", condition, chosen.count(number)))
        chosen.append(number)

    return rows


class DecentralizedEnsemble:
    """Experts, router, caption encoder and image decoder, ready to sample; or one member, as an ensemble of one.

    Args:
        manifest: members, and settings in the field ``about``, as ``manifest_with_about`` or ``resolve`` returns it.
        device: where to sample.
    """

    def __init__(self, manifest: EnsembleManifest, device: torch.device | str = "cpu") -> None:
        self.manifest = manifest
        self.device = torch.device(device)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.about.name!r}, members={list(self.manifest.folders)}, "
            f"condition={self.meta.condition.kind!r}, x_shape={self.meta.x_shape})"
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
            UserError: a file is missing, damaged or of other data, or leads out of the folder; torch cannot use the
                device, ``resident_experts`` below 2, or an encoder's path is not allowed.
        """
        usable = device_of("auto") if device is None else usable_device(device)
        folder = fetched(folder_or_url)
        record = RunFolder(folder).experiment
        experiment = None
        if record.exists() and str(folder) not in DOWNLOADS:
            experiment = load_run(record)

        manifest = manifest_with_about(folder, experiment, partial=True)
        if experiment is None and not allow_paths:
            refuse_paths(manifest)

        manifest.description.sample.resident_experts = None  # chosen for another device
        ensemble = cls(resolve(manifest, resident_experts=resident_experts))
        ensemble._note_lost(folder)
        return ensemble.to(usable)

    @classmethod
    def open(cls, experiment: Experiment, *, partial: bool = False) -> DecentralizedEnsemble:
        """Open a run's or saved ensemble, or the run's ``sample.member``, on the device of ``island.accelerator``.

        Args:
            experiment: from ``load_settings``.
            partial: whether to leave out members whose artifacts are missing, with a note on stderr.

        Raises:
            UserError: members are not finished, a file is damaged or of other data, or there is no such device.
        """
        run = RunFolder.of(experiment)
        member = experiment.sample.member
        manifest = manifest_with_about(run.root, experiment, member=member, partial=partial)
        check_devices(experiment.island.accelerator, 1)
        ensemble = cls(manifest, device_of(experiment.island.accelerator))
        ensemble._note_lost(run.root)
        return ensemble

    def _note_lost(self, folder: Path) -> None:
        if self.manifest.lost:
            names = ", ".join(self.manifest.lost)
            path = folder / ENSEMBLE_FILE
            note(f"{path}: the artifact of {names} is missing; the weights of the rest are renormalised")

    @property
    def about(self) -> About:
        """Name, credit, classes and defaults."""
        return self.manifest.description

    @property
    def meta(self) -> ArtifactMeta:
        """The first expert's ``member.json``; all experts share x_shape, condition, timestep_shift and encoders."""
        return self.manifest.meta

    @property
    def credit_line(self) -> str:
        """Credit of the data, to print below images; empty if none is due."""
        if self.about.credit:
            return f"Trained on: {self.about.credit}"

        return ""

    @cached_property
    def field(self) -> Ensemble:
        """Experts and router as one velocity field; loaded on first use.

        Raises:
            UserError: an artifact is damaged or unusable.
        """
        return load_ensemble(self.manifest, self.device, self.about.sample.resident_experts)

    @property
    def cost(self) -> Cost:
        """Cost of the images sampled so far."""
        return self.field.cost(self.meta.x_shape, self.meta.condition)

    @own_defaults()
    def to(self, device: torch.device | str) -> DecentralizedEnsemble:
        """Load all networks onto a device.

        Raises:
            UserError: torch cannot use it, and the ensemble stays where it is; or as ``field``.
        """
        usable = usable_device(device)
        if usable.type == "cuda":
            configure_cuda()

        vars(self).pop("field", None)  # first, to free its memory
        self.field = load_ensemble(self.manifest, usable, self.about.sample.resident_experts)
        self.device = usable
        return self

    def with_settings(
        self,
        overrides: Sequence[str] = (),
        source: str = "sample",
        factors: Sequence[float] | None = None,
        **arguments: Any,
    ) -> DecentralizedEnsemble:
        """A copy with other settings; it shares the networks.

        Args:
            overrides, source, arguments: as in ``resolve``.
            factors: as in ``sample``.

        Raises:
            UserError: as ``resolve`` and ``Ensemble.reweighted``.
        """
        changed = copy(self)
        changed.manifest = resolve(self.manifest, overrides, source, **arguments)
        changed.field = self.field
        if factors is not None:
            changed.field = self.field.reweighted(listed(factors))

        return changed

    def latents(self, condition: Condition | None, num: int, **more: Any) -> Float[Tensor, "num c h w"]:
        """Generate ``num`` samples with the ensemble's settings.

        Args:
            condition: one per sample, or None for the null condition in all.
            num: number of samples.
            more: ``batch_size``, ``keys``, ``progress``, ``trace`` and ``clusters`` of ``sampler.sample``.

        Returns:
            x_0, float32, on the CPU.

        Raises:
            UserError: as ``sampler.sample``.
        """
        return sample(
            self.field,
            condition,
            num,
            self.meta.x_shape,
            self.about.sample,
            shift=self.meta.timestep_shift,
            seed=self.about.seed,
            **more,
        )

    def decode(self, x_0: Float[Tensor, "n c h w"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Decode samples to images."""
        return built_encoder(IMAGE_ENCODERS, self.meta.image_encoder).decode(x_0)

    def rows(self, prompts: Sequence[str] = (), classes: Sequence[str | int] = ()) -> list[Row]:
        """Rows of a grid: one per prompt or class; by default the first ``MAX_ROWS`` classes, or one null condition.

        Args:
            prompts: texts.
            classes: names or numbers; a number may be text, unless a class has this name.

        Raises:
            UserError: not this ensemble's kind of condition, an empty prompt, or a class that does not exist.
        """
        kind = self.meta.condition.kind
        name = self.about.name
        if prompts and kind in ("class", "none"):
            raise UserError(f"{name} is conditioned on {kind!r}, not on text; leave prompts out")
        if classes and kind != "class":
            raise UserError(f"{name} is conditioned on {kind!r}, not on class; leave classes out")

        if prompts:
            return _rows_of_prompts(prompts, self.meta)
        if kind == "class":
            num_classes = self.meta.condition.size
            return _rows_of_classes(classes, self.about.class_names or [f"class {c}" for c in range(num_classes)])

        return [Row("no condition", "no condition")]

    def images(
        self,
        rows: Sequence[Row],
        num: int,
        progress: Callable[[float], object] = lambda _: None,
        trace: Trace | None = None,
    ) -> Iterator[tuple[int, int, UInt8[np.ndarray, "h w 3"]]]:
        """Generate ``num`` images per row, in batches that bound the memory.

        A prompt or class that is given twice gets other images in its second row.

        Args:
            rows: output of ``rows``.
            num: images per row.
            progress: called with the number of finished images, fractional.
            trace: keeps the sampling trajectory of its samples, by (noise key, index).

        Yields:
            Row, index within the row, and image.
        """
        total = num * len(rows)
        for first in range(0, total, BATCH_SIZE):
            places = [divmod(i, num) for i in range(first, min(first + BATCH_SIZE, total))]
            keys = []
            conditions = []
            for row, index in places:
                keys.append(rows[row].key(index, num))
                condition = rows[row].condition
                if condition is not None:
                    conditions.append(condition)

            x_0 = self.latents(
                Condition.cat(conditions) if conditions else None,
                len(places),
                batch_size=BATCH_SIZE,
                keys=keys,
                progress=lambda done, first=first: progress(first + done),
                trace=trace,
            )
            for (row, index), image in zip(places, self.decode(x_0), strict=True):
                yield row, index, image

    @own_defaults()
    def sample(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        classes: str | int | Sequence[str | int] | None = None,
        strategy: str | None = None,
        num: int | None = None,
        seed: int | None = None,
        trace: Trace | None = None,
        factors: Sequence[float] | None = None,
        **settings: Any,
    ) -> list[Image.Image]:
        """Generate the images that the command ``sample`` writes with the same options.

        Args:
            prompts: a text, or several. None, without classes, is the experiment's.
            classes: a name or number, or several, for an experiment conditioned on classes. None is the first 32.
            strategy: routing strategy; None is the experiment's.
            num: images per prompt or class; None is the experiment's.
            seed: seed of the noise; None is the experiment's.
            trace: keeps the sampling trajectory, such as the weights of the experts.
            factors: multiply the clusters' weights, one per cluster; 0 switches its experts off. None changes nothing.
            settings: other keys of the experiment's ``sample`` section, such as ``num_steps=20``.

        Returns:
            ``num`` images of the first prompt, then of the second, and so on. A repeated prompt gives further images:
            ``["cat"] * 4`` with ``num=1`` is as ``"cat"`` with ``num=4``.

        Raises:
            UserError: an empty prompt or list, an unknown class, strategy or setting, a value out of range, or guidance
                of experts that were not trained for it.
        """
        texts = listed(prompts)
        labels = listed(classes)
        is_empty = (prompts is not None and not texts) or (classes is not None and not labels)
        if is_empty or not all(isinstance(text, str) for text in texts):
            raise UserError("sample: give prompts (strings) or classes, or leave both out for the experiment's")

        settings = {"num_per_prompt": num, "strategy": strategy, "seed": seed, **settings}
        chosen = self.with_settings(factors=factors, **settings)
        own = chosen.about.sample
        if not texts and not labels:
            texts = own.prompts

        images = chosen.images(chosen.rows(texts, labels), own.num_per_prompt, trace=trace)
        return [Image.fromarray(image) for _, _, image in images]

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
            folder = Path(scratch) / "ensemble"
            hub = HfApi(token=options.pop("token", None))
            self.save_pretrained(folder, licence)
            try:
                url = hub.create_repo(repo_id, exist_ok=True, **options)
                hub.upload_folder(repo_id=repo_id, folder_path=folder)
            except (OSError, ValueError) as error:
                raise UserError(
                    f"{repo_id}: cannot be uploaded ({first_line(error)}); "
                    "check name and network, or run: hf auth login"
                ) from None

        return str(url)
