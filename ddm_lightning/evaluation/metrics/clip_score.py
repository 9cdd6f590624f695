"""``clip-score``: 100 times the cosine between an image and its caption in CLIP's space (Hessel et al., 2104.08718)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torchmetrics.multimodal import CLIPScore
from torchmetrics.utilities import dim_zero_cat

from ddm_lightning.core.registry import METRICS
from ddm_lightning.encoders.pretrained import Pretrained, loading
from ddm_lightning.evaluation.metrics.features import Score

_IMAGES_AT_ONCE = 8


class _Clip(Pretrained):
    packages = ("transformers",)
    place = "metric 'clip-score'"
    kinds = {"clip": "CLIPModel"}  # noqa: RUF012  never changed


@METRICS.register("clip-score")
class ClipScore(CLIPScore):
    """torchmetrics' ``CLIPScore`` with a model from a folder; real images do not count.

    Args:
        path: folder of a whole CLIP with its tokenizer and image processor, or its name on the hub.
        revision: see ``Pretrained``.

    Raises:
        UserError: see ``Pretrained``.
    """

    full_state_update = False
    captioned = True
    """``update`` takes captions."""
    means: list[Tensor]

    def __init__(self, path: str, revision: str | None = None) -> None:
        self.clip = clip = _Clip(path, revision=revision)

        def load() -> tuple[Any, Any]:
            with loading(clip.folder, clip.place):
                from transformers import CLIPProcessor

                processor = CLIPProcessor.from_pretrained(clip.folder, local_files_only=True, use_fast=False)

            network = clip._load()
            # torchmetrics slices longer ids itself, without the end-of-text token whose state is the caption's vector.
            most = network.config.text_config.max_position_embeddings
            return network, partial(processor, truncation=True, max_length=most)

        super().__init__(load)
        self.add_state("means", [], dist_reduce_fx="cat")

    def update(  # type: ignore[override]  # torchmetrics has no real images
        self, images: UInt8[np.ndarray, "n h w 3"], captions: Sequence[str] = (), *, real: bool = False
    ) -> None:
        """Add generated images with their captions."""
        if real:
            return

        for start in range(0, len(images), _IMAGES_AT_ONCE):
            chosen = slice(start, start + _IMAGES_AT_ONCE)
            chunk = torch.from_numpy(np.array(images[chosen])).permute(0, 3, 1, 2)
            before = self.score.clone()
            super().update(chunk.to(self.device), list(captions[chosen]))
            added = self.score - before
            self.means.append(added[None] / len(chunk))

    def scores(self) -> dict[str, Score]:
        """Return the mean, with an interval from the scatter of means over eight images each."""
        means = dim_zero_cat(self.means)
        score = Score(float(self.compute()))
        if len(means) > 1:
            error = float(means.std()) / len(means) ** 0.5
            score = Score.of(score.value, error)

        return {"CLIP score": score}
