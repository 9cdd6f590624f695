"""Cost and benefit of each recipe option, changed one at a time from the experiment's settings.

Costs are ratios of step times, measured alternately in one process, of parameters, of FLOPs and, on a GPU, of memory:
there for DiT-XL/2 in bfloat16, on a CPU for the experiment's own network. With --train, an expert is trained with each
option on equally many samples and judged by the held-out loss of its averaged weights.

    python benchmarks/recipe.py -c experiments/emoji_4x.yaml --train --json benchmarks/results/recipe_emoji_4x.json
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from common import MEMBER, REPOSITORY, call, device_of, load, parse, parser, progress, read_variants, run
from recipe_cost import Cost, Costs, TrainingStep, large
from recipe_effect import Effect
from recipe_results import Results
from step_networks import XL2

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core import processes
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.members.member import role_of
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import DataSizes, Manifest

STEPS_PER_TURN = {"cpu": 3, "cuda": 5}
ROUNDS, QUICK_ROUNDS = {"cpu": 30, "cuda": 12}, 3


@dataclass(frozen=True)
class Option:
    """One setting with another value than the experiment's, as ``variants_recipe.yaml`` describes it."""

    name: str
    setting: str
    """Override ``key=value``."""
    timed: bool = True
    """Whether it may change the time of a step."""
    trained: bool = True
    """Whether it may change the trained weights by more than rounding."""


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    # As ``fit`` does: exempt imported objects from garbage collection, and keep freed memory.
    processes.begin()
    processes.end_imports()
    processes.keep_heap()
    cli = parser(__doc__ or "", device=True)
    cli.add_argument(
        "--variants",
        nargs="+",
        default=[str(REPOSITORY / "benchmarks" / "variants_recipe.yaml")],
        metavar=("FILE", "NAME"),
        help="options to measure: those of a file (variants_recipe.yaml), or only the ones named",
    )
    cli.add_argument("--train", action="store_true", help="train the experiment and each option")
    cli.add_argument("--samples", type=int, default=None, help="samples per training (default: the experiment's)")
    cli.add_argument("--seeds", type=int, default=1, help="trainings per option")
    cli.add_argument("--jobs", type=int, default=2, help="trainings at once")
    options = parse(cli, arguments)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: must be at least 1")
    variants = read_variants(options.variants, Option)
    device = device_of(options)
    if device.type == "cpu" or options.train:
        call("prepare", options)
    timing = Timing(options, device)
    effect = Effect(options) if options.train else None
    # Trainings first, because an interrupted run keeps them.
    losses = effect.losses({one.name: one.setting for one in variants if one.trained}) if effect is not None else {}
    results = Results(timing.costs({one.name: one.setting for one in variants if one.timed}), losses)
    title = "; ".join([timing.title, *([] if effect is None else [effect.title])])
    report = results.report(f"Recipe options against {title}", [one.name for one in variants])
    report.notes += timing.notes
    report.finish(options.json)


class Timing:
    """Times steps under other settings and the experiment's.

    Args:
        options: the parsed command line.
        device: device to measure on; on a CPU the experiment's own network is measured, on a GPU DiT-XL/2.
    """

    def __init__(self, options: Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        own = load(options)
        self.settings: list[str] = []
        self.sizes: DataSizes | Manifest
        if device.type == "cuda":
            self.settings, self.sizes = large(XL2, own.prepare.partition.num_clusters)
            self.title = f"{own.name}: steps of a DiT on {device.type}, {XL2}"
        else:
            self.sizes = Manifest.read(RunFolder.of(own).root)
            batch_size = role_of(MEMBER).batch_size(MEMBER, own)
            self.title = f"{own.name}: steps of {MEMBER} on {device.type}, batch {batch_size}"
        torch.set_num_threads(own.island.num_threads)
        self.notes: list[str] = []
        """One line per option that did not run."""

    def costs(self, settings: Mapping[str, str]) -> dict[str, tuple[Cost, Cost]]:
        """Measure the experiment's cost and the cost with each setting, by the option's name."""
        kind, quick = self.device.type, self.options.quick
        base = Costs(partial(self._step, self._load()), QUICK_ROUNDS if quick else ROUNDS[kind], STEPS_PER_TURN[kind])
        found = {}
        with progress() as bars:
            for name, setting in bars.track(settings.items(), description="steps"):
                try:
                    found[name] = base.compare(partial(self._step, self._load(setting)))
                except (UserError, RuntimeError) as error:
                    self.notes.append(f"{name} did not run on {kind}: {first_line(error)}")
        return found

    def _load(self, *settings: str) -> Experiment:
        # Overrides on the command line win over the sizes.
        return load_experiment(self.options.config, [*self.settings, *self.options.overrides, *settings])

    def _step(self, experiment: Experiment) -> TrainingStep:
        return TrainingStep(MEMBER, experiment, self.sizes, self.device)


if __name__ == "__main__":
    run(main)
