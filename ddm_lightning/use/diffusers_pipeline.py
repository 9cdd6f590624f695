"""A pipeline of diffusers over a saved ensemble; needs the extra ``latents``, which brings diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from diffusers.image_processor import VaeImageProcessor

from ddm_lightning.core.errors import UserError
from ddm_lightning.use.ensemble import DecentralizedEnsemble, listed, usable_device
from ddm_lightning.use.export import export_diffusers

_PRECISIONS = {torch.float32: "32-true", torch.bfloat16: "bf16-mixed"}


class DecentralizedPipeline(DiffusionPipeline):  # type: ignore[misc]  # diffusers is not checked
    """Text- or class-to-image with a decentralized ensemble, called like other pipelines of diffusers."""

    def __init__(self, allow_paths: bool = False) -> None:
        super().__init__()
        self._allow_paths = allow_paths
        self._place = torch.device("cpu")
        self._precision: str | None = None

    @cached_property
    def ensemble(self) -> DecentralizedEnsemble:
        """The ensemble of the folder; loaded at first use, because diffusers sets the folder after construction."""
        return DecentralizedEnsemble.from_pretrained(
            self.config["_name_or_path"], str(self._place), allow_paths=self._allow_paths
        )

    def to(self, *places: torch.device | str | torch.dtype, **named: Any) -> DecentralizedPipeline:
        """Choose the device, onto which the next call loads the ensemble, and the precision of later calls.

        Args:
            places: a device, a dtype or both; float32 and bfloat16 are as in ``sample.precision``.
            named: ``device`` and ``dtype``; ``silence_dtype_warnings`` has no effect.

        Raises:
            UserError: torch cannot use the device, or another dtype.
        """
        named.pop("silence_dtype_warnings", None)
        for place in (*places, *named.values()):
            if place in _PRECISIONS:
                self._precision = _PRECISIONS[place]
            elif isinstance(place, torch.dtype):
                raise UserError(f"dtype {place}: must be one of {', '.join(map(str, _PRECISIONS))}")
            elif place is not None:
                self._place = usable_device(place)
                self.__dict__.pop("ensemble", None)

        return self

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Export the ensemble to a new folder."""
        export_diffusers(self.ensemble.manifest, Path(save_directory))

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        class_labels: str | int | Sequence[str | int] | None = None,
        num_images_per_prompt: int = 1,
        num_inference_steps: int | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        **settings: Any,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images; None takes the ensemble's own setting.

        Args:
            prompt: one text or several.
            class_labels: one or several names or numbers, for an ensemble conditioned on classes.
            num_images_per_prompt: images per prompt or class.
            num_inference_steps: steps from noise to data.
            negative_prompt: refused unless empty, because guidance uses the null condition.
            generator: gives the seed of the noise; a list gives each image its own seed. None uses torch's default
                generator, so each call gives other images.
            output_type: ``pil``, or ``np`` or ``pt`` for numbers from 0 to 1, [n h w 3] or [n 3 h w].
            return_dict: whether to return an object with ``.images`` instead of a tuple.
            settings: other keys of ``DecentralizedEnsemble.sample``, such as ``guidance_scale`` and ``strategy``.

        Raises:
            UserError: as ``DecentralizedEnsemble.sample``, prompts and classes, a negative prompt, another
                ``output_type``, or another number of generators than of images.
        """
        if any(listed(negative_prompt)):
            raise UserError("negative_prompt: is not supported; leave it out")
        if output_type not in ("pil", "np", "pt"):
            raise UserError(f"output_type = {output_type!r}: must be pil, np or pt")
        if prompt is not None and class_labels is not None:
            raise UserError("prompt and class_labels: give one of them")

        settings = {"num_steps": num_inference_steps, "precision": self._precision, **settings}
        kind = "classes" if prompt is None else "prompts"
        rows = class_labels if prompt is None else prompt
        calls: list[Any] = [(rows, num_images_per_prompt, generator)]
        if isinstance(generator, Sequence):
            each = listed(rows) or [None]
            num_images = len(each) * num_images_per_prompt
            if len(generator) != num_images:
                raise UserError(f"generator: {len(generator)} for {num_images} images; give one, or one per image")

            calls = [(each[i // num_images_per_prompt], 1, own) for i, own in enumerate(generator)]

        images: Any = []
        for given, num, own in calls:
            images += self.ensemble.sample(**{kind: given, "num": num, "seed": _seed(own), **settings})

        if output_type != "pil":
            images = VaeImageProcessor.pil_to_numpy(images)
        if output_type == "pt":
            images = VaeImageProcessor.numpy_to_pt(images)
        if return_dict:
            return ImagePipelineOutput(images=images)

        return (images,)


def _seed(generator: torch.Generator | None) -> int:
    drawn = torch.randint(2**63 - 1, (), generator=generator, device=getattr(generator, "device", None))
    return int(drawn)
