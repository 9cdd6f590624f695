"""Train thousands of steps in half precision: is a gradient not finite, and does memory grow?

Training skips and records every step whose gradient is not finite; a loss that is not finite has such a gradient. This
benchmark counts the skipped steps.

    python benchmarks/soak.py -c experiments/emoji_4x.yaml --json benchmarks/results/soak_emoji_4x.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from common import Report, call, console, load, parse, parser, run
from trainings import LOSS, Trainings

from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.members.run_folder import RunFolder

ensure_torchvision_importable()

from ddm_lightning.members.artifact import load_network  # noqa: E402  # after torchvision has been made importable
from ddm_lightning.training.guard import read_skipped  # noqa: E402
from ddm_lightning.training.loggers import tensorboard_tag  # noqa: E402

MEMBER = "expert-0"
NUM_STEPS, QUICK_STEPS = 10_000, 300
MEMORY = "train/memory_gb"
CURVES = ("train/loss", "train/gradient_norm", LOSS, MEMORY)
SETTLED = 0.1
"""Share of the training before the first validation."""

Curve = Sequence[tuple[int, float]]


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "")
    cli.add_argument("--steps", type=int, default=None, help=f"optimizer steps (default: {NUM_STEPS})")
    cli.add_argument("--precision", default="bf16-mixed", help="as Lightning names it (default: bf16-mixed)")
    options = parse(cli, arguments)
    options.jobs = 1
    steps = options.steps or (QUICK_STEPS if options.quick else NUM_STEPS)
    experiment = load(options)
    call("prepare", options)
    run_of = RunFolder.of(experiment)
    folder = run_of.root / "benchmarks" / "soak" / f"{MEMBER}-{options.precision}-{steps}-steps"
    every = max(1, round(SETTLED * steps))
    settings = [
        f"expert.train.max_steps={steps}",
        f"island.precision={options.precision}",
        f"island.validate_every_n_steps={every}",
        f"island.checkpoint_every_n_steps={every}",
    ]
    Trainings(options, run_of, MEMBER).losses({folder: settings})
    report = _report(experiment.name, RunFolder(folder), steps, options)
    report.show(console())
    report.write(options.json)


def _report(name: str, soaked: RunFolder, steps: int, options: argparse.Namespace) -> Report:
    member = soaked.member(MEMBER)
    num_skipped = sum(len(read_skipped(path)) for path in member.glob("skipped_steps*.jsonl"))
    weights = load_network(soaked.artifact(MEMBER))[1].state_dict()
    report = Report(f"{steps:,} steps of {MEMBER} of {name} in {options.precision}", ["", "first", "highest", "last"])
    report.figures |= {
        "steps": steps,
        "skipped_steps": num_skipped,
        "weights_not_finite": sum(int((~value.isfinite()).sum()) for value in weights.values()),
        **figures(curves(member / "tensorboard"), steps),
    }
    for curve, points in curves(member / "tensorboard").items():
        values = [value for _, value in points]
        report.row(curve, *(f"{value:.4g}" for value in (values[0], max(values), values[-1])))
    report.note(
        f"Steps skipped because a gradient was not finite: {num_skipped}; averaged weights that are not finite: "
        f"{report.figures['weights_not_finite']:.0f}."
    )
    report.note(
        f"Peak memory grew by {report.figures['memory_growth_gb']:.4f} GB in the last {1 - SETTLED:.0%} of "
        "the steps, in which the first images are generated, and by "
        f"{report.figures['memory_growth_last_half_gb']:.4f} GB in the last half."
    )
    return report


def curves(folder: Path) -> dict[str, Curve]:
    """Read steps and values of the curves from TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tensorboard_tag(tag))] for tag in CURVES}


def figures(found: Mapping[str, Curve], steps: int) -> dict[str, float]:
    """Memory, memory growth, highest gradient norm and final held-out loss."""
    most = found[MEMORY][-1][1]

    def growth(share: float) -> float:
        return most - next(value for step, value in found[MEMORY] if step >= share * steps)

    return {
        "memory_gb": most,
        "memory_growth_gb": growth(SETTLED),
        "memory_growth_last_half_gb": growth(0.5),
        "highest_gradient_norm": max(value for _, value in found["train/gradient_norm"]),
        "held_out_loss": found[LOSS][-1][1],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(run(main))
