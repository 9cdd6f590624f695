"""The Python API: a trained ensemble from a folder or URL, to sample, save and export."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ddm_lightning.config.experiment import Experiment, PluginConfig
from ddm_lightning.core.devices import check_devices, configure_cuda, device_of, own_defaults
from ddm_lightning.core.errors import UserError, first_line, note
from ddm_lightning.core.registry import CAPTION_ENCODERS, IMAGE_ENCODERS, Registry, require
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import About, EnsembleManifest
from ddm_lightning.ensemble.routing import Trace
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Cost, Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.artifact import ArtifactMeta
from ddm_lightning.members.member import ROUTER
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.use.download import fetched
from ddm_lightning.use.saved import manifest_with_about, save_ensemble
from ddm_lightning.use.settings import experiment_of, load_settings, resolve

Row: TypeAlias = tuple[str, str, Condition | None]
"""Label, noise key and condition of a row of images."""

MAX_ROWS = 32
"""Largest number of rows in a grid."""
# Images computed at once; the number does not change them.
BATCH_SIZE = 64


def first_indices(rows: Sequence[Row], num: int) -> list[int]:
    """Index of each row's first image of ``num``: a row that repeats another one goes on where that one ends."""
    counts = Counter[str]()
    found = []
    for _, key, _ in rows:
        found.append(counts[key])
        counts[key] += num

    return found


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
    """Return one thing, or several, as a list."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given]

    return list(given)


@lru_cache(maxsize=2)  # some load for seconds
def _built(registry: Registry, name: str, params: str) -> Any:
    return registry.build(name, json.loads(params))


def built_encoder(registry: Registry, plugin: PluginConfig) -> Any:
    """Build an encoder, or take the one built before with the same params."""
    return _built(registry, plugin.name, json.dumps(plugin.params))


def text_condition(texts: Sequence[str], experiment: Experiment) -> Condition:
    """Encode ``texts`` as vectors, tokens or both with the experiment's caption encoder."""
    plugin = experiment.prepare.caption_encoder
    assert plugin is not None, "check_experiment asks for one"
    encoder = built_encoder(CAPTION_ENCODERS, plugin)
    parts = []
    for kind in experiment.condition.kind.split("+"):
        # An encoder may have only one of the two methods.
        if kind == "tokens":
            values = encoder.tokens(list(texts))
        else:
            values = encoder.vectors(list(texts))

        parts.append(torch.from_numpy(values))

    return Condition.of(*parts)


def _rows_of_prompts(prompts: Sequence[str], experiment: Experiment) -> list[Row]:
    for prompt in prompts:
        if not prompt.strip():
            raise UserError("a prompt is empty; describe an image")
        if re.search(r"[\udc80-\udcff]", prompt):  # as Python reads other bytes
            raise UserError("a prompt is not UTF-8; set the terminal's encoding to it")

    condition = text_condition(prompts, experiment)
    return [(prompt, prompt, condition.rows(torch.tensor([row]))) for row, prompt in enumerate(prompts)]


def _rows_of_classes(classes: Sequence[str | int], names: Sequence[Any]) -> list[Row]:
    numbers = range(len(names))
    rows: list[Row] = []
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

        rows.append((names[number], f"class {number}", Condition.of(torch.tensor([number]))))

    return rows


class DecentralizedEnsemble:
    """Experts, router, caption encoder and image decoder, ready to sample; or one member, as an ensemble of one.

    Args:
        manifest: members and the field ``about``, as ``manifest_with_about`` returns it.
        experiment: settings of sampling, seed and encoders; None takes those of the manifest.
        device: where to sample.
    """

    def __init__(
        self, manifest: EnsembleManifest, experiment: Experiment | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.manifest = manifest
        self.experiment = experiment or experiment_of(manifest)
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
        accelerator = "auto"
        if device is not None:
            accelerator = "gpu" if usable_device(device).type == "cuda" else "cpu"

        overrides = ["sample.member=null", f"island.accelerator={accelerator}", "sample.resident_experts=null"]
        if resident_experts is not None:
            overrides[-1] = f"sample.resident_experts={resident_experts}"

        experiment = load_settings(fetched(folder_or_url), overrides, allow_paths=allow_paths)
        ensemble = cls.open(experiment, partial=True)
        return ensemble.to(device or ensemble.device)

    @classmethod
    def open(cls, experiment: Experiment, *, partial: bool = False) -> DecentralizedEnsemble:
        """Open a run's or saved ensemble, or the run's ``sample.member``, on the device of ``island.accelerator``.

        Args:
            experiment: from ``load_settings`` or ``resolve``.
            partial: whether to leave out members whose artifacts are missing, with a note on stderr.

        Raises:
            UserError: members are not finished, a file is damaged or of other data, or there is no such device.
        """
        run = RunFolder.of(experiment)
        member = experiment.sample.member
        manifest = manifest_with_about(run.root, experiment, member=member, partial=partial)
        if manifest.lost:
            names = ", ".join(manifest.lost)
            line = f"{run.ensemble}: the artifact of {names} is missing; samples are made without it"
            if names != ROUTER:
                line += ", and the weights of the other experts are renormalised"

            note(line)

        check_devices(experiment.island.accelerator, 1)
        return cls(manifest, experiment, device_of(experiment.island.accelerator))

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
        return load_ensemble(self.manifest, self.device, self.experiment.sample.resident_experts)

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
        self.field = load_ensemble(self.manifest, usable, self.experiment.sample.resident_experts)
        self.device = usable
        return self

    def with_settings(self, experiment: Experiment, factors: Sequence[float] | None = None) -> DecentralizedEnsemble:
        """A copy with other settings, which shares the networks.

        Args:
            experiment: from ``resolve``.
            factors: as in ``sample``.

        Raises:
            UserError: as ``Ensemble.reweighted``.
        """
        field = self.field
        if factors is not None:
            field = field.reweighted(listed(factors))

        changed = copy(self)
        changed.experiment = experiment
        changed.field = field
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
            self.experiment.sample,
            shift=self.meta.timestep_shift,
            seed=self.experiment.seed,
            **more,
        )

    def decode(self, x_0: Float[Tensor, "n c h w"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Decode samples to images."""
        encoder = built_encoder(IMAGE_ENCODERS, self.experiment.prepare.image_encoder)
        return encoder.decode(x_0)

    def rows(self, prompts: Sequence[str] = (), classes: Sequence[str | int] = ()) -> list[Row]:
        """Condition the rows of a grid: one per prompt or class; by default the first classes or one row without.

        Args:
            prompts: texts.
            classes: numbers, and names or, where none has that name, numbers as text.

        Raises:
            UserError: not this ensemble's kind of condition, an empty prompt, or a class that does not exist.
        """
        kind = self.experiment.condition.kind
        name = self.experiment.name
        if prompts and kind in ("class", "none"):
            raise UserError(f"{name} is conditioned on {kind!r}, not on text; leave prompts out")
        if classes and kind != "class":
            raise UserError(f"{name} is conditioned on {kind!r}, not on class; leave classes out")

        if prompts:
            return _rows_of_prompts(prompts, self.experiment)
        if kind == "class":
            num_classes = self.meta.condition.size
            return _rows_of_classes(classes, self.about.class_names or [f"class {c}" for c in range(num_classes)])

        return [("no condition", "no condition", None)]

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
        firsts = first_indices(rows, num)
        for first in range(0, total, BATCH_SIZE):
            places = [divmod(i, num) for i in range(first, min(first + BATCH_SIZE, total))]
            keys = []
            conditions = []
            for row, index in places:
                _, key, condition = rows[row]
                keys.append((key, firsts[row] + index))
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
            UserError: an empty prompt or list, an unknown class, strategy or setting, or a value out of range.
        """
        texts = [] if prompts is None else listed(prompts)
        shown = [] if classes is None else listed(classes)
        is_empty = (prompts is not None and not texts) or (classes is not None and not shown)
        if is_empty or not all(isinstance(text, str) for text in texts):
            raise UserError("sample: give prompts (strings) or classes, or leave both out for the experiment's")

        settings = {"num_per_prompt": num, **settings}
        experiment = resolve(self.experiment, strategy=strategy, seed=seed, **settings)
        chosen = self.with_settings(experiment, factors)
        if not texts and not shown:
            texts = experiment.sample.prompts

        rows = chosen.rows(texts, shown)
        images = chosen.images(rows, experiment.sample.num_per_prompt, trace=trace)
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
