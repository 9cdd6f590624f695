"""Time of one optimizer step: our loop against a bare one and our network against diffusers'.

The sides alternate in one process, a few steps each; ratios are medians over neighbouring groups of turns. On a GPU the
networks are DiT-XL/2 in bfloat16 with compiled blocks. ``--shapes`` compares steps of our network on nine shapes, a
batch of each in turn, with those on one shape instead.

    python benchmarks/step.py --json benchmarks/results/step.json
"""

from __future__ import annotations

import gc
import itertools
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import GRIDS, Report, call, device_of, load, parse, parser, run
from step_clock import HEADINGS, add_ratio, grouped, in_turn
from step_loops import Trained, train
from step_networks import XL2, Sizes, Step, diffusers_side, our_side, random_batch

STEPS_PER_TURN = 5
TURNS_PER_GROUP = 5
STEPS_PER_GROUP = STEPS_PER_TURN * TURNS_PER_GROUP
FULL = "32-true"
HALF = "bf16-mixed"
ENDS = {FULL: "", HALF: "_bf16_compiled"}
"""Ends of the figures' names: in bfloat16, our blocks are compiled, too, as with ``island.compile``."""
SMALL = Sizes(width=384, depth=6, num_heads=6, edge=16, batch_size=4)


@dataclass(frozen=True, kw_only=True)
class Loop(Sizes):
    """Sizes of a member to train on coloured shapes."""

    text_size: int

    def overrides(self, folder: Path, num_groups: int, device: str, num_samples: int) -> list[str]:
        """Overrides of ``tiny_2x.yaml``; it has two clusters, so the expert takes half of the global batch."""
        settings = [f"run_dir={folder}", *ISLANDS[device]]
        settings.append(f"prepare.source.params={{num_samples: {num_samples}, image_size: {self.edge}}}")
        settings.append(f"prepare.caption_encoder.params.size={self.text_size}")
        sizes = f"width: {self.width}, depth: {self.depth}, num_heads: {self.num_heads}, patch_size: {self.patch_size}"
        settings.append(f"expert.network={{name: dit, params: {{{sizes}}}}}")
        settings.append(f"expert.train.global_batch_size={2 * self.batch_size}")
        num_steps = num_groups * STEPS_PER_GROUP
        settings.append(f"expert.train.max_steps={num_steps}")
        settings.append(f"island.log_every_n_steps={STEPS_PER_GROUP}")
        # Neither validate nor save: their time is not the loop's.
        for work in ("validate", "checkpoint"):
            settings.append(f"island.{work}_every_n_steps={num_steps + 1}")

        return settings


ISLANDS = {
    "cpu": ["island.accelerator=cpu", f"island.precision={FULL}", "island.compile=false"],
    "cuda": ["island.accelerator=gpu", f"island.precision={HALF}", "island.compile=true"],
}
LOOPS = {
    "cpu": Loop(width=256, depth=4, num_heads=4, edge=16, text_size=64, batch_size=8),
    "cuda": Loop(width=1152, depth=28, num_heads=16, edge=32, text_size=768, batch_size=16),
}
DEMO = Loop(width=128, depth=4, num_heads=4, patch_size=4, edge=24, text_size=512, batch_size=16)
NETWORKS = {"cpu": [(SMALL, FULL), (SMALL, HALF)], "cuda": [(XL2, HALF)]}
"""Sizes and precision of our network and others."""
SIZES = ((16, 200, 30), (3, 40, 3))
"""Groups of turns, batches of an epoch (a new one costs time), and rounds of the networks: in all, with ``--quick``."""


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    gc.freeze()  # what is imported is never scanned again, as in ``fit``
    cli = parser(__doc__ or "", fixed=True, device=True)
    cli.add_argument("--shapes", action="store_true", help="compare nine shapes with one, and nothing else")
    options = parse(cli, arguments)
    device = device_of(options)
    name = device.type
    torch.set_num_threads(1)
    num_groups, num_batches, num_rounds = SIZES[options.quick]
    report = Report(f"One optimizer step on {name}, one thread", HEADINGS)
    add = add_shapes
    if not options.shapes:
        add = add_networks
        for end, loop in (("", LOOPS[name]), ("_demo", DEMO)):
            with tempfile.TemporaryDirectory(prefix="step-") as folder:
                overrides = loop.overrides(Path(folder), num_groups, name, num_batches * loop.batch_size)
                add_loop(report, end, loop, trained(options, overrides))

        report.note(
            "Networks are compared by forward, backward and fused AdamW. In diffusers' AdaLayerNormZero each block has "
            "its own embedder of time and class; with a shared embedder, which each block still calls, it has as many "
            "parameters as ours."
        )

    for sizes, precision in NETWORKS[name]:
        add(report, sizes, precision, device, num_rounds)

    report.note(
        "Ratios are medians over neighbouring groups of turns. CPU times are disturbed less. Times are medians."
    )
    report.finish(options.json)


def trained(options: Namespace, overrides: Sequence[str]) -> Trained:
    """Prepare the data in a process of its own, then train with both loops."""
    call("prepare", options, *overrides)
    torch.compiler.reset()
    return train(load(options, *overrides), STEPS_PER_TURN)


def add_loop(report: Report, end: str, loop: Loop, trained: Trained) -> None:
    """Add the row and the figures of the loops, without the first group, which warms up."""
    ours = grouped(trained.ours, TURNS_PER_GROUP, STEPS_PER_GROUP)[1:]
    bare = grouped(trained.bare, TURNS_PER_GROUP, STEPS_PER_GROUP)[1:]
    title = f"Trainer against a bare loop: {loop}; same weights: {trained.same}"
    add_ratio(report, f"trainer_over_bare_loop{end}", title, ours, bare)
    report.figures[f"same_weights{end}"] = float(trained.same)


def add_networks(report: Report, sizes: Sizes, precision: str, device: torch.device, num_rounds: int) -> None:
    """Add rows and figures of our network against diffusers'."""
    others = {
        "diffusers": diffusers_side(sizes, nearest=False),
        "diffusers_nearest": diffusers_side(sizes, nearest=True),
    }
    ours = Step(our_side(sizes), sizes, device, precision, compiled=precision == HALF)
    ways = {"ours": ours.take}
    for name, side in others.items():
        ways[name] = Step(side, sizes, device, precision, compiled=False).take

    found = in_turn(ways, device, num_rounds, STEPS_PER_TURN)
    for name, side in others.items():
        title = f"DiT, {precision}, against {side.title}: {sizes}"
        add_ratio(report, f"ours_over_{name}{ENDS[precision]}", title, found["ours"], found[name])


def add_shapes(report: Report, sizes: Sizes, precision: str, device: torch.device, num_rounds: int) -> None:
    """Add the row and the figures of our network on nine shapes against one; each turn takes a step of each shape."""
    step = Step(our_side(sizes), sizes, device, precision, compiled=precision == HALF)

    def steps(grids: Sequence[tuple[int, int]]) -> Callable[[], None]:
        scale = sizes.edge // 8
        shapes = [(sizes.channels, scale * rows, scale * columns) for rows, columns in grids]
        batches = itertools.cycle([random_batch(sizes.batch_size, one, device) for one in shapes])

        def take() -> None:
            step.x_t, step.target, step.t = next(batches)
            step.take()

        return take

    ways = {"shapes": steps(GRIDS), "one": steps(GRIDS[:1])}
    found = in_turn(ways, device, num_rounds // 3, len(GRIDS))
    title = f"DiT, {precision}, nine shapes (ours) or one (other): {sizes}"
    add_ratio(report, f"shapes_over_one{ENDS[precision]}", title, found["shapes"], found["one"])


if __name__ == "__main__":
    run(main)
