"""A trained ensemble, and all training or held-out samples of a run, in memory and in the source's order."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import numpy as np
import torch
from common import call, load, use_all_threads
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.encoders.interfaces import ImageEncoder, StoredForm
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.evaluation.image_sets import open_side
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.run import Run


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

    def condition(self, kind: str) -> Condition | None:
        """Conditions of the samples for a ``condition.kind``; None for ``none``."""
        if kind == "none":
            return None
        if kind == "class":
            return Condition.of(self.labels)
        if kind == "tokens":
            raise UserError("key 'condition.kind' = 'tokens': benchmarks read pooled vectors only; set text")
        assert self.texts is not None, "check_experiment asks for a caption encoder"
        return Condition.of(self.texts)


def trained(options: Namespace, *overrides: str) -> tuple[Run, Ensemble]:
    """Train what is missing of an experiment's ensemble and load it; from then on all cores compute."""
    call("fit", options, *overrides)
    use_all_threads()
    run = Run(load(options, *overrides))
    return run, load_ensemble(read_ensemble(run.folder.ensemble))


def encoder_of(run: Run) -> ImageEncoder:
    """The run's image encoder."""
    plugin = run.experiment.prepare.image_encoder
    encoder: ImageEncoder = IMAGE_ENCODERS.build(plugin.name, plugin.params)
    return encoder


def read_split(run: Run, side: str) -> Split:
    """Read the shards of all clusters; ``side`` is ``TRAIN`` or ``HELD_OUT`` of ``shards.manifest``.

    Raises:
        UserError: a shard is missing or damaged, or this side has no samples.
    """
    shards, _ = open_side(run.folder.shards, run.manifest, side)
    samples = shards.take(np.arange(len(shards)))
    order = samples["sample_id"].argsort()
    samples = {name: column[order] for name, column in samples.items()}
    x_0 = StoredForm(run.manifest.stores, run.manifest.normalisation).mean(samples["x_0"].float())
    return Split(samples["cluster"], samples["label"], x_0, samples.get("text"))


def noised(x_0: Float[Tensor, "n c h w"], t: float, draw: int, seed: int, purpose: str) -> Float[Tensor, "n c h w"]:
    """Add the noise of one draw to every sample; different purposes have different noise."""
    noise = torch.randn(x_0.shape, generator=keyed_generator(seed, purpose, draw))
    return interpolate(x_0, noise, torch.full((len(x_0),), t))
