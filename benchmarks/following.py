"""Whether images follow their prompts: the share that lies nearest to a training image of the same prompt."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from jaxtyping import Float
from split import Split, read_split
from torch import Tensor

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.ensemble.load import load_single
from ddm_lightning.ensemble.routing import sample
from ddm_lightning.evaluation.metrics.kid import image_features
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import TRAIN, Manifest

BATCH_SIZE = 64


class Prompts:
    """Training samples of a member's clusters: their prompts, and the features of their images.

    Args:
        experiment: conditioned on texts or classes.
        run: prepared.
        member: an expert or the monolith.
        num: prompts at most, drawn at random.
    """

    def __init__(self, experiment: Experiment, run: RunFolder, member: str, num: int) -> None:
        self.sampling, self.seed, self.kind = experiment.sample, experiment.seed, experiment.condition.kind
        plugin = experiment.prepare.image_encoder
        self.encoder = IMAGE_ENCODERS.build(plugin.name, plugin.params)
        whole = read_split(run, Manifest.read(run.root), TRAIN)
        rows = torch.isin(whole.clusters, torch.tensor(int(member.partition("-")[2]))).nonzero()[:, 0]
        condition = whole.condition(self.kind)
        assert condition is not None  # there are prompts
        self.condition = condition.rows(rows)
        self.names = _names(whole, rows, self.kind)
        self.features = image_features(self.encoder.decode(whole.x_0[rows]))
        order = torch.randperm(len(rows), generator=keyed_generator(self.seed, "prompts"))
        self.drawn = order[:num]
        counts = Counter(self.names)
        drawn = [self.names[row] for row in self.drawn.tolist()]
        self.chance = sum(counts[name] for name in drawn) / (len(drawn) * len(self.names))
        """The share that a training image drawn at random for each prompt would have."""

    def followed(self, artifact: Path) -> float:
        """Of images of these prompts, guided as the experiment's own are, by the expert alone."""
        loaded = load_single(artifact)
        x_0 = sample(
            loaded.ensemble,
            self.condition.rows(self.drawn),
            len(self.drawn),
            loaded.meta.x_shape,
            strategy="full",
            solver="euler",
            num_steps=self.sampling.num_steps,
            shift=loaded.meta.timestep_shift,
            guidance_scale=self.sampling.guidance_scale,
            seed=self.seed,
            batch_size=BATCH_SIZE,
        )
        found = nearest(image_features(self.encoder.decode(x_0)), self.features)
        return sum(self.names[i] == self.names[j] for i, j in zip(self.drawn.tolist(), found, strict=True)) / len(found)


def _names(split: Split, rows: Tensor, kind: str) -> list[str]:
    return [split.captions[row] if kind == "text" else str(int(split.labels[row])) for row in rows.tolist()]


def nearest(features: Float[Tensor, "n d"], known: Float[Tensor, "m d"]) -> list[int]:
    """The row of ``known`` in the direction nearest to that of each of ``features``."""
    unit = [torch.nn.functional.normalize(one.double(), dim=1) for one in (features, known)]
    found: list[int] = (unit[0] @ unit[1].T).argmax(1).tolist()
    return found
