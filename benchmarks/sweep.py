"""Grid search over a member's learning rate and batch size.

Every training sees as many samples as the experiment's, unless ``--samples`` is given. Warm-up and the decay of the
average scale with the batch, so that they last for equally many samples. Trainings are judged by the held-out loss of
the averaged weights and, if there are prompts, by the share of images that follow theirs.

    python benchmarks/sweep.py -c experiments/emoji_4x.yaml --json benchmarks/results/sweep_emoji_4x.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from common import Report, call, console, load, parse, parser, progress, run
from following import Prompts
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from trainings import Trainings

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write
from ddm_lightning.members.member import ROUTER, batch_size, parse_members, train_config
from ddm_lightning.members.run_folder import RunFolder

FACTORS = (0.5, 1.0, 2.0)
QUICK_SAMPLES = 1600
NUM_PROMPTS, QUICK_PROMPTS = 128, 8


@dataclass(frozen=True)
class Point:
    """One training of the grid."""

    rate: float
    """Peak learning rate."""
    batch: int
    """The member's samples per step."""
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"rate-{self.rate:g}-batch-{self.batch}-seed-{self.seed}"


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "")
    cli.add_argument("--member", default="expert-0", help="member to train")
    cli.add_argument("--samples", type=int, default=None, help="samples per training (default: the experiment's)")
    cli.add_argument("--seeds", type=int, default=1, help="trainings per pair")
    cli.add_argument("--jobs", type=int, default=2, help="trainings at once")
    cli.add_argument("--prompts", type=int, default=None, help=f"images per training (default: {NUM_PROMPTS})")
    for name, values in (("rates", "learning rates"), ("batches", "batch sizes")):
        cli.add_argument(
            f"--{name}", type=float, nargs="+", default=FACTORS, help=f"{values}, as multiples of the experiment's"
        )
    options = parse(cli, arguments)
    sweep = Sweep(options)
    call("prepare", options)
    report = Report(
        f"Held-out loss of {options.member} of {sweep.experiment.name} after {sweep.num_samples:,} samples",
        ["learning rate", *(f"batch {batch}" for batch in sweep.batches)],
    )
    losses = sweep.losses()
    followed, chance = sweep.followed()
    sweep.fill(report, losses, followed, chance)
    report.show(console())
    report.write(options.json)
    image = sweep.folder / "sweep.png"
    figure = plot(losses, followed, report.title)
    atomic_write(image, lambda path: figure.savefig(path, dpi=120))
    print(f"image: {image}")


class Sweep:
    """The grid of one member, trained in a folder inside the experiment's run folder.

    Raises:
        UserError: an unknown member, or a batch size that is not a whole number.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.experiment: Experiment = load(options)
        members = parse_members(options.member, self.experiment)
        if len(members) != 1:
            raise UserError(f"--member {options.member}: name one member, such as expert-0")
        self.member = members[0]
        train = train_config(self.member, self.experiment)
        self.own = Point(train.learning_rate, batch_size(self.member, self.experiment), self.experiment.seed)
        self.num_samples = options.samples or (QUICK_SAMPLES if options.quick else train.max_steps * self.own.batch)
        for name in ("seeds", "jobs", "samples", "prompts"):
            number = getattr(options, name)
            if number is not None and number < 1:
                raise UserError(f"--{name} {number}: must be at least 1")
        if not all(factor > 0 and math.isfinite(factor) for factor in (*options.rates, *options.batches)):
            raise UserError("--rates and --batches: give multiples of the experiment's values, each above 0")
        sizes = [factor * self.own.batch for factor in options.batches]
        if any(size != int(size) or size < 1 for size in sizes):
            raise UserError(f"--batches {options.batches}: times {self.own.batch} samples is not a whole number")
        self.batches = [int(size) for size in sizes]
        self.rates = [factor * self.own.rate for factor in options.rates]
        run = RunFolder.of(self.experiment)
        self.trainings = Trainings(options, run, self.member)
        self.folder = run.root / "benchmarks" / "sweep" / f"{self.member}-{self.num_samples}-samples"

    def points(self) -> Iterator[Point]:
        """Yield all trainings."""
        for batch in self.batches:
            for rate in self.rates:
                for seed in range(self.options.seeds):
                    yield Point(rate, batch, self.experiment.seed + seed)

    def losses(self) -> dict[Point, float]:
        """Run the trainings that are not finished; return the held-out loss of each."""
        folders = {point: self.folder / point.name for point in self.points()}
        found = self.trainings.losses({folder: self.settings(point) for point, folder in folders.items()})
        return {point: found[folder] for point, folder in folders.items()}

    def followed(self) -> tuple[dict[Point, float], float]:
        """Share of each expert's images that follow their prompts, and the share for random training images.

        Empty for a router, or without prompts.
        """
        kind = self.experiment.condition.kind
        if self.member == ROUTER or kind not in ("text", "class"):
            return {}, 0.0
        num = self.options.prompts or (QUICK_PROMPTS if self.options.quick else NUM_PROMPTS)
        points = list(self.points())
        with progress(console()) as bars:
            task = bars.add_task("images", total=len(points))
            prompts, found = Prompts(self.experiment, self.trainings.run, self.member, num), {}
            for point in points:
                found[point] = prompts.followed(RunFolder(self.folder / point.name).artifact(self.member))
                bars.advance(task)
        return found, prompts.chance

    def settings(self, point: Point) -> list[str]:
        """Overrides for the training ``point``."""
        section = "router" if self.member == ROUTER else "expert"
        train = train_config(self.member, self.experiment)
        longer = self.own.batch / point.batch
        steps = round(self.num_samples / point.batch)
        total = point.batch * train.global_batch_size // self.own.batch
        values = {
            "max_steps": steps,
            "learning_rate": point.rate,
            "global_batch_size": total,
            "warmup_steps": round(train.warmup_steps * steps / train.max_steps),
            "ema_decay": train.ema_decay ** (1 / longer),
        }
        return [
            f"seed={point.seed}",
            f"island.validate_every_n_steps={steps}",
            *(f"{section}.train.{key}={json.dumps(value)}" for key, value in values.items()),
        ]

    def fill(self, report: Report, losses: dict[Point, float], followed: dict[Point, float], chance: float) -> None:
        """Fill in the table, the figures and the best pair."""
        means, shares = mean_over_seeds(losses), mean_over_seeds(followed)
        best = min(means, key=means.__getitem__)
        for (rate, batch), share in shares.items():
            report.figures[f"followed_rate_{rate:g}_batch_{batch}"] = share
        if shares:
            report.note(
                "In brackets: share of images, generated for training prompts by the expert alone, whose nearest "
                f"training image has the same prompt; for random training images it is {chance:.1%}."
            )
            report.figures["followed_by_chance"] = chance
        for rate in self.rates:
            report.row(
                f"{rate:g}",
                *(
                    f"{means[rate, batch]:.4f}{f' [{shares[rate, batch]:.0%}]' if shares else ''}"
                    f"{' (lowest)' if (rate, batch) == best else ''}"
                    f"{' (the experiment)' if (rate, batch) == (self.own.rate, self.own.batch) else ''}"
                    for batch in self.batches
                ),
            )
        for (rate, batch), loss in means.items():
            report.figures[f"loss_rate_{rate:g}_batch_{batch}"] = loss
        report.figures |= {"best_rate": best[0], "best_batch": best[1]}
        own = means.get((self.own.rate, self.own.batch))
        if own is not None:
            report.figures["experiment_over_best"] = own / means[best]
            report.note(f"The experiment's own pair has {own / means[best]:.3f} times the lowest loss.")
        spread = [max(group) - min(group) for group in by_pair(losses).values()]
        if self.options.seeds > 1:
            report.figures["largest_spread_over_seeds"] = max(spread)
            report.note(f"Means over {self.options.seeds} seeds, whose losses differ by up to {max(spread):.4f}.")


def by_pair(losses: dict[Point, float]) -> dict[tuple[float, int], list[float]]:
    """Losses of all seeds by learning rate and batch size."""
    grouped: dict[tuple[float, int], list[float]] = {}
    for point, loss in losses.items():
        grouped.setdefault((point.rate, point.batch), []).append(loss)
    return grouped


def mean_over_seeds(losses: dict[Point, float]) -> dict[tuple[float, int], float]:
    """Mean loss by learning rate and batch size."""
    return {pair: sum(group) / len(group) for pair, group in by_pair(losses).items()}


def plot(losses: dict[Point, float], followed: dict[Point, float], title: str) -> Figure:
    """Plot losses and, if measured, prompt following over the learning rate: a curve per batch size, a dot per seed."""
    panels = {"held-out loss of the averaged weights": losses}
    if followed:
        panels["share of images that follow their prompts"] = followed
    figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for axis, (name, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _panel(axis, name, values)
    return figure


def _panel(axis: Axes, name: str, values: dict[Point, float]) -> None:
    means = mean_over_seeds(values)
    for index, batch in enumerate(sorted({batch for _, batch in means})):
        rates = sorted(rate for rate, size in means if size == batch)
        axis.plot(rates, [means[rate, batch] for rate in rates], color=f"C{index}", label=f"{batch} samples per step")
        dots = [(point.rate, loss) for point, loss in values.items() if point.batch == batch]
        axis.plot(*zip(*dots, strict=True), "o", color=f"C{index}", markersize=4)
    axis.set_xscale("log")
    rates = sorted({rate for rate, _ in means})
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("peak learning rate")
    axis.set_ylabel(name)
    axis.legend()


if __name__ == "__main__":
    sys.exit(run(main))
