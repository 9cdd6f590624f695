"""Cost and benefit of each recipe option, changed one at a time from the experiment's settings.

Costs are ratios of step times, measured alternately in one process, of parameters, of FLOPs and, on a GPU, of memory:
there for DiT-XL/2 in bfloat16, on a CPU for the experiment's own network. With --train, an expert is trained with each
option on equally many samples and judged by the held-out loss of its averaged weights.

    python benchmarks/recipe.py -c experiments/emoji_4x.yaml --train --json benchmarks/results/recipe_emoji_4x.json
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

import torch
from common import call, console, load, parse, parser, progress, run, save_figure

from ddm_lightning.core import processes
from ddm_lightning.core.compat import ensure_torchvision_importable

ensure_torchvision_importable()

from recipe_cost import Cost, Costs, TrainingStep, large  # noqa: E402  # after torchvision has been made importable
from recipe_effect import Effect  # noqa: E402
from recipe_options import MEMBER, Option, chosen, options_of  # noqa: E402
from recipe_results import Results, plot  # noqa: E402
from step_gpu import XL2  # noqa: E402
from step_networks import Sizes  # noqa: E402

from ddm_lightning.config.experiment import Experiment  # noqa: E402
from ddm_lightning.config.load import load_experiment  # noqa: E402
from ddm_lightning.core.errors import UserError, first_line  # noqa: E402
from ddm_lightning.members.roles import batch_size  # noqa: E402
from ddm_lightning.members.run_folder import RunFolder  # noqa: E402
from ddm_lightning.shards.manifest import DataSizes, Manifest  # noqa: E402

STEPS_PER_TURN = {"cpu": 3, "cuda": 5}
ROUNDS, QUICK_ROUNDS = {"cpu": 30, "cuda": 12}, 3


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    # As ``fit`` does: exempt imported objects from garbage collection, and keep freed memory.
    processes.begin()
    processes.end_imports()
    processes.keep_heap()
    cli = parser(__doc__ or "")
    cli.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: cuda where there is one")
    cli.add_argument("--compile", action="store_true", help="also time compiled blocks")
    cli.add_argument("--only", nargs="+", metavar="NAME", help="options to measure, such as: --only rope mlp_swiglu")
    cli.add_argument("--train", action="store_true", help="train the experiment and each option")
    cli.add_argument("--samples", type=int, default=None, help="samples per training (default: the experiment's)")
    cli.add_argument("--seeds", type=int, default=1, help="trainings per option")
    cli.add_argument("--jobs", type=int, default=2, help="trainings at once")
    options = parse(cli, arguments)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} {getattr(options, name)}: must be at least 1")
    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; give --device cpu")
    if name == "cpu" or options.train:
        call("prepare", options)
    timing = Timing(options, XL2, torch.device(name))
    effect = Effect(options) if options.train else None
    timed, trained = chosen(options.only, timing.found, [] if effect is None else effect.found)
    losses = {} if effect is None else effect.losses(trained)  # first, because an interrupted run keeps them
    results = Results(timing.costs(timed), losses)
    rows = list({option.name: option for option in [*timed, *trained]}.values())
    title = "; ".join([timing.title, *([] if effect is None else [effect.title])])
    report = results.report(f"Recipe options against {title}", rows)
    report.notes += timing.notes
    report.show(console())
    report.write(options.json)
    if effect is not None:
        image = effect.folder / "recipe.png"
        save_figure(image, plot(results, rows, report.title))
        print(f"image: {image}")


class Timing:
    """Options to time, and the experiment to compare them with.

    Args:
        options: the parsed command line.
        sizes: sizes of the network on a GPU; on a CPU the experiment's network is measured.
        device: device to measure on.
    """

    def __init__(self, options: Namespace, sizes: Sizes, device: torch.device) -> None:
        self.options, self.device = options, device
        own = load(options)
        self.settings: list[str] = []
        self.sizes: DataSizes | Manifest
        if device.type == "cuda":
            self.settings, self.sizes = large(sizes, own.prepare.partition.num_clusters)
            self.title = f"{own.name}: steps of a DiT on {device.type}, {sizes}"
        else:
            self.sizes = Manifest.read(RunFolder.of(own).root)
            self.title = f"{own.name}: steps of {MEMBER} on {device.type}, batch {batch_size(MEMBER, own)}"
        torch.set_num_threads(own.island.num_threads)
        self.experiment = self._load()
        on_gpu = device.type == "cuda"
        found = options_of(self.experiment, self.sizes, on_gpu=on_gpu, compiles=options.compile)
        self.found = [option for option in found if option.is_timed]
        self.notes: list[str] = []
        """One line per option that did not run."""

    def costs(self, options: Sequence[Option]) -> dict[str, tuple[Cost, Cost]]:
        """Measure the experiment's cost and the cost with each option, by the option's name."""
        if not options:
            return {}
        experiments = {option.name: self._load(option.setting) for option in options}
        kind, quick = self.device.type, self.options.quick
        base = Costs(
            partial(self._step, self.experiment), QUICK_ROUNDS if quick else ROUNDS[kind], STEPS_PER_TURN[kind]
        )
        found = {}
        with progress(console()) as bars:
            task = bars.add_task("steps", total=len(options))
            for name, experiment in experiments.items():
                try:
                    found[name] = base.compare(partial(self._step, experiment))
                except (UserError, RuntimeError) as error:
                    self.notes.append(f"{name} did not run on {kind}: {first_line(error)}")
                bars.advance(task)
        return found

    def _load(self, *settings: str) -> Experiment:
        # Overrides on the command line win over the sizes.
        return load_experiment(self.options.config, [*self.settings, *self.options.overrides, *settings])

    def _step(self, experiment: Experiment) -> TrainingStep:
        return TrainingStep(MEMBER, experiment, self.sizes, self.device)


if __name__ == "__main__":
    sys.exit(run(main))
