"""Benefit of an option: held-out loss of an expert trained with it, against one trained without."""

from __future__ import annotations

import math
import shutil
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from common import MEMBER, all_of, load, progress, start

from ddm_lightning.core.errors import UserError
from ddm_lightning.members.member import role_of
from ddm_lightning.members.run_folder import RunFolder, refuse_changed
from ddm_lightning.members.status import MemberStatus, loss_of

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
        train, batch = self.experiment.expert.train, role_of(MEMBER).batch_size(MEMBER, self.experiment)
        samples = QUICK_SAMPLES if options.quick else train.max_steps * batch
        num_samples: int = samples if options.samples is None else options.samples
        if num_samples < batch:
            raise UserError(f"--samples {num_samples}: a step of {MEMBER} takes {batch}")
        self.num_steps = round(num_samples / batch)
        self.run = RunFolder.of(self.experiment)
        self.folder = self.run.root / "benchmarks" / "recipe" / f"{MEMBER}-{num_samples}-samples"
        self.title = f"loss of {MEMBER} after {num_samples:,} samples"

    def losses(self, options: Mapping[str, str]) -> dict[str, list[float]]:
        """Run the trainings that are not finished.

        Args:
            options: the setting of each option, by its name.

        Returns:
            The held-out loss of each seed, by option name and ``BASE``.

        Raises:
            UserError: a folder holds another experiment, a training failed, or there are no held-out samples.
        """
        seeds = range(self.experiment.seed, self.experiment.seed + self.options.seeds)
        settings = {BASE: [], **{name: [setting] for name, setting in options.items()}}
        trainings = [(name, seed) for name in settings for seed in seeds]
        given = [self.settings(name, seed, *settings[name]) for name, seed in trainings]
        for each in given:
            refuse_changed(load(self.options, *each))
        with progress() as bars, ThreadPoolExecutor(self.options.jobs) as pool:
            bar = bars.add_task("trainings", total=len(trainings))
            found = all_of(
                [pool.submit(self._loss, each) for each in given], lambda num: bars.update(bar, completed=num)
            )
        by_training = dict(zip(trainings, found, strict=True))
        return {name: [by_training[name, seed] for seed in seeds] for name in settings}

    def settings(self, name: str, seed: int, *option: str) -> list[str]:
        """Overrides of a training with a seed and the setting of an option; its folder is called ``name``."""
        train = self.experiment.expert.train
        return [
            f"run_dir={self.folder / f'{name}-seed-{seed}'}",
            f"island.shards={self.run.shards.resolve()}",
            f"seed={seed}",
            f"expert.train.max_steps={self.num_steps}",
            f"expert.train.warmup_steps={round(train.warmup_steps * self.num_steps / train.max_steps)}",
            f"island.validate_every_n_steps={self.num_steps}",
            *option,
        ]

    def _loss(self, settings: Sequence[str]) -> float:
        run = RunFolder(Path(settings[0].partition("=")[2]))
        if not run.has_artifact(MEMBER):
            if not (run.prepared / "manifest.json").exists():
                # The shards are not copied.
                shutil.rmtree(run.root, ignore_errors=True)
                run.prepared.mkdir(parents=True)
                shutil.copy(self.run.prepared / "manifest.json", run.prepared)
            start("fit", self.options, *settings, f"member={MEMBER}").ended()
        loss = loss_of(MemberStatus.read(run.member(MEMBER), MEMBER, 0).metrics, "held_out")
        if loss is None:
            raise UserError(f"{run.root}: {MEMBER} has no held-out samples; see prepare.held_out_fraction")
        return loss


def difference(losses: Sequence[float], base: Sequence[float]) -> Difference:
    """Compare trainings seed by seed; equal seeds share initial weights, samples and noise."""
    each = [ours - theirs for ours, theirs in zip(losses, base, strict=True)]
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None
    return Difference(statistics.fmean(each), error)
