"""All training or held-out samples of a run, in memory and in the source's order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.encoders.interfaces import ImageEncoder, StoredForm
from ddm_lightning.evaluation.image_sets import open_side
from ddm_lightning.members.run import Run
from ddm_lightning.use.rows import built_encoder


@dataclass(frozen=True, eq=False)
class Split:
    """Samples in the source's order."""

    clusters: Int[Tensor, " n"]
    """The cluster of each."""
    labels: Int[Tensor, " n"]
    """The source's label of each."""
    x_0: Float[Tensor, "n c h w"]
    """Samples as the experts model them, float32."""
    texts: Float[Tensor, "n size"] | None
    """Pooled text vectors, float32; None if the shards hold none."""

    def __len__(self) -> int:
        return len(self.x_0)


def encoder_of(run: Run) -> ImageEncoder:
    """The run's image encoder."""
    return built_encoder(IMAGE_ENCODERS, run.experiment.prepare.image_encoder)


def read_split(run: Run, side: str) -> Split:
    """Read the shards of all clusters; ``side`` is ``TRAIN`` or ``HELD_OUT`` of ``shards.manifest``.

    Raises:
        UserError: a shard is missing or damaged, or this side has no samples.
    """
    shards, *_ = open_side(run.folder.shards, run.manifest, side)
    samples = shards.take(np.arange(len(shards)))
    order = samples["sample_id"].argsort()
    samples = {name: column[order] for name, column in samples.items()}
    x_0 = StoredForm(run.manifest.stores, run.manifest.normalisation).mean(samples["x_0"].float())
    return Split(samples["cluster"], samples["label"], x_0, samples.get("text"))
