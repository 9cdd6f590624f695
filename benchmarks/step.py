"""Time of one optimizer step: our loop against a bare one and our network against diffusers'.

The sides alternate in one process, a few steps each; ratios are medians over neighbouring groups of turns. On a GPU the
networks are DiT-XL/2 in bfloat16 with compiled blocks.

    python benchmarks/step.py --json benchmarks/results/step.json
"""

from __future__ import annotations

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import step_networks
import torch
from common import Report, call, device_of, load, parse, parser, run
from step_clock import Seconds, grouped, median, ratio, ratios
from step_loops import Trained, train
from step_networks import XL2, Sizes

from ddm_lightning.core import processes

LOOP_BAR = 1.02
NETWORK_BAR = {"cpu": 0.9, "cuda": 0.6}
STEPS_PER_TURN = 5
TURNS_PER_GROUP = 5
HEADINGS = ["", "ours, ms per step", "other, ms per step", "ratio"]
SMALL = Sizes(width=384, depth=6, num_heads=6, patch_size=2, channels=4, edge=16, batch_size=4)


@dataclass(frozen=True)
class Networks:
    """Settings under which our network is compared with others."""

    sizes: Sizes
    end: str = ""
    """Suffix of its figures' names."""
    half: bool = False
    """Whether all networks run under bfloat16 autocast."""
    compiled: Mapping[str, bool] = field(default_factory=lambda: {"": False})
    """Further suffix of figures -> whether our blocks are compiled, as with ``island.compile``."""


@dataclass(frozen=True)
class Loop:
    """Sizes of a member to train on coloured shapes."""

    end: str
    """Suffix of its figures' names."""
    width: int
    depth: int
    num_heads: int
    patch_size: int
    image_size: int
    text_size: int
    batch_size: int

    def overrides(self, folder: Path, num_groups: int, device: str, num_samples: int) -> list[str]:
        """Overrides of ``tiny_2x.yaml``; it has two clusters, so the expert takes half of the global batch."""
        network = (
            f"width: {self.width}, depth: {self.depth}, num_heads: {self.num_heads}, patch_size: {self.patch_size}"
        )
        num_steps = num_groups * TURNS_PER_GROUP * STEPS_PER_TURN
        return [
            f"run_dir={folder}",
            f"prepare.source.params={{num_samples: {num_samples}, image_size: {self.image_size}}}",
            f"prepare.caption_encoder.params.size={self.text_size}",
            f"expert.network={{name: dit, params: {{{network}}}}}",
            f"expert.train.max_steps={num_steps}",
            f"expert.train.global_batch_size={2 * self.batch_size}",
            f"island.accelerator={'gpu' if device == 'cuda' else 'cpu'}",
            f"island.precision={'bf16-mixed' if device == 'cuda' else '32-true'}",
            f"island.compile={'true' if device == 'cuda' else 'false'}",
            f"island.log_every_n_steps={TURNS_PER_GROUP * STEPS_PER_TURN}",
            # Neither validate nor save: their time is not the loop's.
            f"island.validate_every_n_steps={num_steps + 1}",
            f"island.checkpoint_every_n_steps={num_steps + 1}",
        ]


LOOPS = {
    "cpu": Loop("", 256, 4, 4, 2, image_size=16, text_size=64, batch_size=8),
    "cuda": Loop("", 1152, 28, 16, 2, image_size=32, text_size=768, batch_size=16),
}
BOTH = {"": False, "_compiled": True}
NETWORKS = {
    "cpu": (Networks(SMALL, compiled=BOTH), Networks(SMALL, "_bf16", half=True, compiled=BOTH)),
    "cuda": (Networks(XL2, half=True, compiled={"": True}),),
}
DEMO = Loop("_demo", 128, 4, 4, 4, image_size=24, text_size=512, batch_size=16)


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    # As ``fit`` does: exempt imported objects from garbage collection.
    processes.begin()
    processes.end_imports()
    options = parse(parser(__doc__ or "", fixed=True, device=True), arguments)
    device = device_of(options)
    name = device.type
    torch.set_num_threads(1)
    report = Report(f"One optimizer step on {name}, one thread", HEADINGS)
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        for loop in (LOOPS[name], DEMO):
            if options.quick:
                num_groups = 3
            else:
                num_groups = 16

            # About 100 steps per epoch, or 20 with --quick; each new epoch costs time.
            num_samples = (40 if options.quick else 200) * loop.batch_size
            overrides = loop.overrides(Path(folder) / f"run{loop.end}", num_groups, name, num_samples)
            add_loop(report, loop, trained(options, overrides))

    if options.quick:
        num_rounds = 3
    else:
        num_rounds = 30

    for kind in NETWORKS[name]:
        add_networks(report, kind, device, num_rounds)

    report.note(
        "Networks are compared by forward, backward and fused AdamW. In diffusers' AdaLayerNormZero each block has its "
        "own embedder of time and class; with a shared embedder, which each block still calls, it has as many "
        "parameters as ours."
    )
    report.note(
        "Ratios are medians (lowest to highest) over neighbouring groups of turns; square brackets hold the ratio of "
        "CPU times, which other processes disturb less. Times are medians."
    )
    report.finish(options.json)


def trained(options: Namespace, overrides: Sequence[str]) -> Trained:
    """Prepare the data in a process of its own, then train with both loops."""
    call("prepare", options, *overrides)
    experiment = load(options, *overrides)
    if experiment.island.compile:
        step_networks.forget_compiled()

    return train(experiment, STEPS_PER_TURN)


def add_loop(report: Report, loop: Loop, trained: Trained) -> None:
    """Add the row and the figures of the loops, without the first group, which warms up."""
    turns = trained.turns
    steps = TURNS_PER_GROUP * turns.steps
    ours, bare = (grouped(side, TURNS_PER_GROUP, steps)[1:] for side in (turns.ours, turns.bare))
    title = (
        f"Trainer against a bare loop{loop.end.replace('_', ', ')}: width {loop.width}, depth {loop.depth}, "
        f"{(loop.image_size // loop.patch_size) ** 2} tokens, batch {loop.batch_size}"
    )
    _row(report, title, ours, bare)
    figure = f"trainer_over_bare_loop{loop.end}"
    report.figures |= {
        figure: ratio(ours, bare),
        f"{figure}_cpu_seconds": ratio(ours, bare, "cpu"),
        f"seconds_trainer{loop.end}": median(ours),
        f"seconds_bare_loop{loop.end}": median(bare),
        f"same_weights{loop.end}": float(same(trained)),
    }
    if not loop.end:
        _bar(report, figure, LOOP_BAR)

    if same(trained):
        equal = "bit-identical"
    else:
        equal = "not identical"

    report.note(f"{figure}: weights and averages of both are {equal} after {len(turns.ours) * turns.steps} steps.")


def same(trained: Trained) -> bool:
    """Whether both loops ended with the same weights and averages."""
    ours, bare = trained.weights
    pairs = [(ours[name], bare[name]) for name in bare] + list(zip(*trained.averages, strict=True))
    # The Trainer moves its network back to the host.
    return ours.keys() == bare.keys() and all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def add_networks(report: Report, kind: Networks, device: torch.device, num_rounds: int) -> None:
    """Add rows and figures of our network against diffusers'."""
    ours = {f"ours{end}": step_networks.our_side(kind.sizes) for end in kind.compiled}
    others = {
        "diffusers": step_networks.diffusers_side(kind.sizes, nearest=False),
        "diffusers_nearest": step_networks.diffusers_side(kind.sizes, nearest=True),
    }
    compiled = {f"ours{end}" for end, is_compiled in kind.compiled.items() if is_compiled}
    steps = {
        name: step_networks.Step(side, kind.sizes, device, half=kind.half, compiled=name in compiled)
        for name, side in {**ours, **others}.items()
    }
    found = step_networks.in_turn(steps, num_rounds, 10 if device.type == "cuda" else 1)
    millions = {name: f"{side.num_parameters / 1e6:.2f} M" for name, side in {**ours, **others}.items()}
    for our, end in zip(ours, kind.compiled, strict=True):
        kinds = f"{'compiled, ' if our in compiled else ''}{'bfloat16' if kind.half else '32 bits'}"
        for name, other in others.items():
            parameters = f"{millions[our]} and {millions[name]} parameters"
            title = f"DiT, {kinds}, against {other.title}: {parameters}, {kind.sizes}"
            _row(report, title, found[our], found[name])
            figure = f"ours_over_{name}{kind.end}{end}"
            report.figures |= {
                figure: ratio(found[our], found[name]),
                f"{figure}_cpu_seconds": ratio(found[our], found[name], "cpu"),
            }

        _bar(report, f"ours_over_diffusers{kind.end}{end}", NETWORK_BAR[device.type])
        report.figures[f"seconds_ours{kind.end}{end}"] = median(found[our])

    report.figures |= {f"seconds_{name}{kind.end}": median(found[name]) for name in others}
    report.figures |= {f"parameters_{name}": side.num_parameters for name, side in others.items()}
    report.figures["parameters_ours"] = next(iter(ours.values())).num_parameters


def _row(report: Report, title: str, ours: Sequence[Seconds], others: Sequence[Seconds]) -> None:
    each = ratios(ours, others)
    shown = f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f}) [{ratio(ours, others, 'cpu'):.3f}]"
    report.row(title, f"{1000 * median(ours):.1f}", f"{1000 * median(others):.1f}", shown)


def _bar(report: Report, figure: str, bar: float) -> None:
    value = report.figures[figure]
    report.note(f"{figure} {value:.3f}, bar {bar:g}: {'met' if value <= bar else 'not met'}.")


if __name__ == "__main__":
    run(main)
