"""The Python API: a trained ensemble from a folder or URL, to sample, save and export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import checks
from ddm_lightning.core.buckets import sizes_of
from ddm_lightning.core.devices import check_devices, device_of, own_defaults
from ddm_lightning.core.errors import DOWNLOADS, UserError, note
from ddm_lightning.core.formatting import Bars
from ddm_lightning.ensemble.routing import Trace
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, RunFolder, load_run
from ddm_lightning.use import call
from ddm_lightning.use.download import fetched
from ddm_lightning.use.loaded import LoadedEnsemble
from ddm_lightning.use.rows import listed
from ddm_lightning.use.saved import artifact_in, manifest_with_about, push_to_hub, save_ensemble, single_with_about
from ddm_lightning.use.settings import KEYS, refuse_paths, refuse_unknown, resolve


class DecentralizedEnsemble(LoadedEnsemble):
    """Experts, router, caption encoder and image decoder, ready to sample; or one member, as an ensemble of one."""

    @classmethod
    def from_pretrained(
        cls,
        folder_or_url: str | Path,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | None = None,
        torch_dtype: torch.dtype | None = None,
        resident_experts: int | None = None,
        allow_paths: bool = False,
        **others: Any,
    ) -> DecentralizedEnsemble:
        """Load an ensemble. An expert whose artifact is missing is left out, with a note on stderr.

        Args:
            folder_or_url: run folder (``experiment.yaml``, ``ensemble.json``, ``prepared/manifest.json`` and the
                artifacts), saved ensemble, or a URL of one of them that fsspec reads, such as ``hf://owner/name`` for
                a repository of the Hugging Face hub; a URL is downloaded first. A member's folder or artifact, on this
                machine only, is loaded as an ensemble of one.
            device: where to sample, such as ``"cuda"``; None is a GPU if there is one.
            dtype: in which the networks compute: float32, bfloat16 or float16, as in ``sample.precision``, which None
                leaves as it is. Weights stay float32.
            torch_dtype: another name of ``dtype``.
            resident_experts: experts on the device at once, at least 2, if it is too small for all; the others wait
                in the host's memory or on disk. None is all.
            allow_paths: whether encoders may read a path, or a model of the hub, that the ensemble names. A local run
                folder's own encoders always may.
            others: none; an option of another library is refused with the name of ours.

        Raises:
            UserError: a file is missing, damaged or of other data, or leads out of the folder; torch cannot use the
                device or dtype, ``resident_experts`` below 2, an unknown option, or an encoder's path is not allowed.
        """
        refuse_unknown("from_pretrained", others, cls.from_pretrained)
        usable, precision = call.device_and_dtype(device or device_of("auto"), dtype or torch_dtype)
        folder = fetched(folder_or_url)
        artifact = artifact_in(folder)
        record = RunFolder(folder).experiment
        experiment = None
        if artifact is not None:
            manifest, experiment = single_with_about(artifact)
        else:
            if record.exists() and str(folder) not in DOWNLOADS:
                experiment = load_run(record)

            manifest = manifest_with_about(folder, experiment, partial=True)

        if experiment is None and not allow_paths:
            refuse_paths(manifest)

        manifest.description.sample.resident_experts = None  # chosen for another device
        ensemble = cls(resolve(manifest, resident_experts=resident_experts))
        ensemble._note_lost(folder)
        return ensemble.to(usable, precision)

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

    def set_progress_bar_config(self, **options: Any) -> None:
        """Turn the progress bar off (``disable=True``) or on; other options of tqdm have no effect."""
        self._progress_bar_config = options

    def sample(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        classes: str | int | Sequence[str | int] | None = None,
        num: int | None = None,
        seed: int | Sequence[int] | None = None,
        **settings: Any,
    ) -> list[Image.Image]:
        """Generate the images that the command ``sample`` writes with the same options.

        Args:
            prompts: a text, or several. None, without classes, is the experiment's.
            classes: a name or number, or several, for an experiment conditioned on classes. None is the first 32.
            num: images per prompt or class; None is the experiment's.
            seed: seed of the noise, or one per image; None is the experiment's.
            settings: other arguments of ``__call__``, such as ``strategy="full"`` and ``num_steps=20``.

        Returns:
            ``num`` images of the first prompt, then of the second, and so on. A repeated prompt gives further images:
            ``["cat"] * 4`` with ``num=1`` is as ``"cat"`` with ``num=4``.

        Raises:
            UserError: an empty prompt or list, an unknown class, strategy or setting, a value out of range, or guidance
                of experts that were not trained for it.
        """
        if seed is None and "generator" not in settings:
            seed = self.about.seed

        given = {"prompt": prompts, "class_labels": classes, "num_images_per_prompt": num, "seed": seed, **settings}
        return self(**given)[0]

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        class_labels: str | int | Sequence[str | int] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seed: int | Sequence[int] | None = None,
        latents: Float[Tensor, "n c h w"] | None = None,
        image: Any = None,
        strength: float = call.STRENGTH,
        height: int | None = None,
        width: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        batch_size: int | None = None,
        trace: Trace | None = None,
        factors: Sequence[float] | None = None,
        **settings: Any,
    ) -> Any:
        """Generate images, called as a pipeline of diffusers; for what is None, as the experiment says.

        Args:
            prompt: one text or several.
            class_labels: one or several names or numbers, for an ensemble conditioned on classes.
            negative_prompt: a text for all or one per prompt. It takes the place of the null condition in experts and
                router, so it needs a ``guidance_scale`` other than 1.
            num_images_per_prompt: images per prompt or class.
            num_inference_steps: steps from noise to data.
            guidance_scale: scale of classifier-free guidance; 1 means none.
            generator: gives the seed of the noise; one per image gives each its own, and then the first image of its
                prompt. Without it and ``seed``, each call gives other images.
            seed: in place of a generator, one integer or one per image. One gives the images of the command ``sample``.
            latents: noise to start from. A stochastic solver draws further noise by the seed.
            image: image to start from instead of noise alone, or one per prompt (SDEdit, 2108.01073): of Pillow,
                or arrays [h w 3] or tensors [3 h w] of uint8 or numbers from 0 to 1. Other sizes are stretched.
            strength: share of the steps that are run from the noisy image, in (0, 1].
            height, width: in pixels; one alone is a square, and without both the experiment's ``sample.size`` holds, or
                the first of several. An aspect ratio without a bucket takes the nearest, with a note on stderr;
                ``exact=True`` takes any.
            output_type: ``pil``, ``np`` or ``pt`` for float32 from 0 to 1, [n h w 3] or [n 3 h w], or ``latent`` for
                x_0, float32, [n c h w].
            return_dict: has no effect, as the result is both a tuple and an object.
            callback_on_step_end: called after each step with the ensemble, the step's number from 0,
                the time t that it reached and ``{"latents": x_t}``. Here t runs from 1, noise, to 0, the
                image. It may return a dict with other ``latents``.
            callback_on_step_end_tensor_inputs: ``["latents"]``, as there are no other tensors.
            batch_size: images computed at once; None is 64, and with a callback all. ``sampler.sample`` says where it
                changes no bit.
            trace: keeps the sampling trajectory, such as the weights of the experts.
            factors: multiply the clusters' weights, one per cluster; 0 switches its experts off. None changes nothing.
            settings: other keys of the experiment's ``sample`` section, such as ``strategy`` and ``solver``.

        Returns:
            Images, those of the first prompt first; ``.images`` or ``[0]`` of the result holds them.

        Raises:
            UserError: as ``sample``, or a value of another type, shape, number or size.
        """
        refuse_unknown("sample", settings, self.__call__, KEYS)
        texts = listed(prompt)
        labels = listed(class_labels)
        negatives = listed(negative_prompt)
        is_empty = (prompt is not None and not texts) or (class_labels is not None and not labels)
        if is_empty or (texts and labels) or not all(isinstance(text, str) for text in [*texts, *negatives]):
            raise UserError("sample: give prompts (strings) or classes, or leave both out for the experiment's")

        seeds = call.seeds_of(seed, generator)
        options: dict[str, Any] = {"output_type": output_type, "strength": strength, "batch_size": batch_size}
        on_step_end = call.step_callback(callback_on_step_end, callback_on_step_end_tensor_inputs, self)
        more: dict[str, Any] = {
            "strength": strength,
            "x_1": call.noise_of(latents),
            "on_step_end": on_step_end,
            "trace": trace,
        }
        if len(seeds) == 1:
            settings["seed"] = seeds[0]
        else:
            more["seed"] = options["seed"] = seeds

        checks.check(options, call.Options, "", "sample", references=False)
        settings = {"num_steps": num_inference_steps, **settings}
        sides = [side for side in (height, width) if side is not None]
        if sides:
            settings["size"] = listed([sides[0], sides[-1]])

        with own_defaults():
            chosen = self.with_settings(
                factors=factors, num_per_prompt=num_images_per_prompt, guidance_scale=guidance_scale, **settings
            )
            own = chosen.about.sample
            if not labels:
                texts = texts or own.prompts

            size, *_ = sizes_of(own.size)
            rows = chosen.rows(texts, labels, negatives, image, size)
            num = own.num_per_prompt
            total = num * len(rows.labels)
            if batch_size or callback_on_step_end:
                more["batch_size"] = batch_size or total

            with Bars(show=not self._progress_bar_config.get("disable")) as bars:
                task = bars.add_task("images", total=total)
                more["progress"] = bars.from_here(task)
                x_0 = chosen.samples(rows, num, range(total), **more)

            images = call.converted(x_0, self.decode, output_type)

        return call.Output(images)

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
        return push_to_hub(self.manifest, repo_id, licence, options)
