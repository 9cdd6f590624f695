"""A pipeline of diffusers over a saved ensemble; needs the extra ``latents``, which brings diffusers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput

from ddm_lightning.evaluation.pretrained import DecentralizedEnsemble, export_diffusers


class DecentralizedPipeline(DiffusionPipeline):  # type: ignore[misc]  # diffusers is not checked
    """Text- or class-to-image with a decentralized ensemble, called like other pipelines of diffusers."""

    def __init__(self) -> None:
        super().__init__()
        self._place: torch.device | str = "cpu"

    @cached_property
    def ensemble(self) -> DecentralizedEnsemble:
        """The ensemble of the folder; loaded at first use, because diffusers tells the folder after construction."""
        return DecentralizedEnsemble.from_pretrained(self.config["_name_or_path"], str(self._place))

    def to(self, device: torch.device | str) -> DecentralizedPipeline:
        """Move the ensemble to ``device``."""
        self._place = device
        self.ensemble.to(device)
        return self

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Export the ensemble to a new folder."""
        export_diffusers(self.ensemble.manifest, Path(save_directory))

    def __call__(
        self,
        prompt: str | Sequence[str] = (),
        *,
        class_labels: Sequence[str | int] = (),
        num_images_per_prompt: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        generator: torch.Generator | None = None,
        strategy: str | None = None,
        **settings: Any,
    ) -> ImagePipelineOutput:
        """Generate images; None takes the ensemble's own setting.

        Args:
            prompt: one text or several.
            class_labels: names or numbers, for an ensemble conditioned on classes.
            num_images_per_prompt: images of each.
            num_inference_steps: steps from noise to data.
            guidance_scale: classifier-free guidance; 1 is none.
            generator: only its initial seed counts.
            strategy: routing strategy.
            settings: other keys of ``DecentralizedEnsemble.sample``.

        Raises:
            UserError: as ``DecentralizedEnsemble.sample``.
        """
        given: dict[str, Any] = {"num_steps": num_inference_steps, "guidance_scale": guidance_scale}
        images = self.ensemble.sample(
            [prompt] if isinstance(prompt, str) else prompt,
            classes=class_labels,
            strategy=strategy,
            num=num_images_per_prompt,
            seed=None if generator is None else generator.initial_seed(),
            **{key: value for key, value in given.items() if value is not None},
            **settings,
        )
        return ImagePipelineOutput(images=images)
