"""Prompt following: share of generated images whose nearest training image has the same prompt."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from split import Split, read_split
from torch import Tensor

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.registry import FEATURES, IMAGE_ENCODERS
from ddm_lightning.ensemble.load import load_single
from ddm_lightning.ensemble.routing import sample
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import TRAIN, Manifest

BATCH_SIZE = 64


def image_features(images: UInt8[np.ndarray, "n h w 3"]) -> Float[Tensor, "n d"]:
    """Compute the features by which images are compared."""
    return torch.from_numpy(FEATURES.build("efficientnet-lite0", {}).encode(images))


class Prompts:
    """Prompts and image features of an expert's training samples.

    Args:
        experiment: an experiment with text or class conditions.
        run: its prepared run folder.
        member: name of the expert.
        num: maximum number of random prompts to sample.
    """

    def __init__(self, experiment: Experiment, run: RunFolder, member: str, num: int) -> None:
        self.sampling, self.seed, self.kind = experiment.sample, experiment.seed, experiment.condition.kind
        plugin = experiment.prepare.image_encoder
        self.encoder = IMAGE_ENCODERS.build(plugin.name, plugin.params)
        whole = read_split(run, Manifest.read(run.root), TRAIN)
        rows = torch.isin(whole.clusters, torch.tensor(int(member.partition("-")[2]))).nonzero()[:, 0]
        condition = whole.condition(self.kind)
        assert condition is not None
        self.condition = condition.rows(rows)
        self.names = _names(whole, rows, self.kind)
        self.features = image_features(self.encoder.decode(whole.x_0[rows]))
        order = torch.randperm(len(rows), generator=keyed_generator(self.seed, "prompts"))
        self.chosen = order[:num]
        counts = Counter(self.names)
        chosen = [self.names[row] for row in self.chosen.tolist()]
        self.chance = sum(counts[name] for name in chosen) / (len(chosen) * len(self.names))
        """Share of matches with a random training image for each prompt."""

    def followed(self, artifact: Path) -> float:
        """Generate one image per prompt with the expert alone and return the share that follows its prompt."""
        loaded = load_single(artifact)
        x_0 = sample(
            loaded.ensemble,
            self.condition.rows(self.chosen),
            len(self.chosen),
            loaded.meta.x_shape,
            strategy="full",
            solver="euler",
            num_steps=self.sampling.num_steps,
            shift=loaded.meta.timestep_shift,
            settings=self.sampling,
            seed=self.seed,
            batch_size=BATCH_SIZE,
        )
        found = nearest(image_features(self.encoder.decode(x_0)), self.features)
        pairs = zip(self.chosen.tolist(), found, strict=True)
        return sum(self.names[i] == self.names[j] for i, j in pairs) / len(found)


def _names(split: Split, rows: Tensor, kind: str) -> list[str]:
    return [split.captions[row] if kind == "text" else str(int(split.labels[row])) for row in rows.tolist()]


def nearest(features: Float[Tensor, "n d"], known: Float[Tensor, "m d"]) -> list[int]:
    """Row of ``known`` with the highest cosine similarity to each row of ``features``."""
    unit = [torch.nn.functional.normalize(one.double(), dim=1) for one in (features, known)]
    found: list[int] = (unit[0] @ unit[1].T).argmax(1).tolist()
    return found
