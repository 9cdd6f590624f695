"""Benefit of an option: held-out loss of an expert trained with it, against one trained without."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

from common import load
from recipe_options import MEMBER, Option, options_of
from trainings import Trainings

from ddm_lightning.core.errors import UserError
from ddm_lightning.members.roles import batch_size
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import Manifest

BASE = "experiment"
"""Name of the training without any option."""
QUICK_SAMPLES = 1600


class Difference(NamedTuple):
    """Mean difference over seeds."""

    mean: float
    error: float | None
    """Standard error of the mean; None for a single seed."""


class Effect:
    """Trainings of an expert on equally many samples, in folders inside the experiment's run folder.

    Raises:
        UserError: fewer samples than one step takes.
    """

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.experiment = load(options)
        train, batch = self.experiment.expert.train, batch_size(MEMBER, self.experiment)
        samples = QUICK_SAMPLES if options.quick else train.max_steps * batch
        self.num_samples: int = samples if options.samples is None else options.samples
        if self.num_samples < batch:
            raise UserError(f"--samples {self.num_samples}: a step of {MEMBER} takes {batch}")
        self.num_steps = round(self.num_samples / batch)
        run = RunFolder.of(self.experiment)
        self.trainings = Trainings(options, run, MEMBER)
        self.folder = run.root / "benchmarks" / "recipe" / f"{MEMBER}-{self.num_samples}-samples"
        found = options_of(self.experiment, Manifest.read(run.root))
        self.found = [option for option in found if option.is_trained]
        self.title = f"loss of {MEMBER} after {self.num_samples:,} samples"

    def losses(self, options: Sequence[Option]) -> dict[str, list[float]]:
        """Run the trainings that are not finished; return the held-out loss per seed by option name and ``BASE``.

        Raises:
            UserError: a folder holds another experiment, or a training failed.
        """
        if not options:
            return {}
        tried: dict[str, Option | None] = {BASE: None} | {option.name: option for option in options}
        folders = {name: [self.folder / f"{name}-seed-{seed}" for seed in self.seeds] for name in tried}
        settings = {
            folder: self.settings(option, seed)
            for name, option in tried.items()
            for folder, seed in zip(folders[name], self.seeds, strict=True)
        }
        found = self.trainings.losses(settings)
        return {name: [found[folder] for folder in of_seeds] for name, of_seeds in folders.items()}

    @property
    def seeds(self) -> range:
        """The experiment's seed and the ones that follow it."""
        return range(self.experiment.seed, self.experiment.seed + self.options.seeds)

    def settings(self, option: Option | None, seed: int) -> list[str]:
        """Overrides for a training with ``option`` and ``seed``; None for the experiment without options."""
        train = self.experiment.expert.train
        return [
            f"seed={seed}",
            f"expert.train.max_steps={self.num_steps}",
            f"expert.train.warmup_steps={round(train.warmup_steps * self.num_steps / train.max_steps)}",
            f"island.validate_every_n_steps={self.num_steps}",
            *([] if option is None else [option.setting]),
        ]


def difference(losses: Sequence[float], base: Sequence[float]) -> Difference:
    """Compare trainings seed by seed; equal seeds share initial weights, samples and noise."""
    each = [ours - theirs for ours, theirs in zip(losses, base, strict=True)]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return Difference(statistics.fmean(each), error)
