"""Training speed of an experiment's expert on one device: samples per second, MFU, HFU, planned and measured memory.

Measures whole steps of Lightning's Trainer for some seconds, all but loading, on random latents of 4 x 32 x 32 and 77
text tokens, with the experiment's precision, compilation and activation checkpointing. Needs no data.

    python benchmarks/mfu.py -c experiments/laion_24b.yaml --batch 8 --json benchmarks/results/mfu_laion_24b.json
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from common import ACCELERATORS, MEMBER, Report, device_of, load, parse, parser, run
from step_memory import peak_bytes

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.members.cost import MemberCost, step_cost
from ddm_lightning.members.member import Member
from ddm_lightning.shards.manifest import DataSizes
from ddm_lightning.training.measure import samples_per_second

LATENTS = DataSizes((4, 32, 32), 768, (77, 768), 1000)
"""Sizes of 256 x 256 images encoded by Stable Diffusion's VAE, and of captions encoded by CLIP ViT-L/14."""
HEADINGS = ["samples per step", "ms per step", "samples/s", "MFU", "HFU", "planned, GB", "peak, GB"]


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    gc.freeze()  # what is imported is never scanned again, as in ``fit``
    cli = parser(__doc__ or "", device=True)
    cli.add_argument("--batch", type=int, nargs="+", default=[32], help="samples per step; several are taken in turn")
    options = parse(cli, arguments)
    device = device_of(options).type
    own = load(options)
    report = Report(f"{MEMBER} of {own.name} on one {device} device, {own.island.precision}", HEADINGS)
    for batch in options.batch:
        total = batch * own.prepare.partition.num_clusters
        settings = [f"expert.train.global_batch_size={total}", f"island.accelerator={ACCELERATORS[device]}"]
        try:
            add(report, load(options, *settings, "island.devices=1", "island.strategy=auto"))
        except torch.OutOfMemoryError:
            report.row(str(batch), "out of memory", *[""] * 5)

    report.finish(options.json)


def add(report: Report, experiment: Experiment, sizes: DataSizes = LATENTS) -> None:
    """Add the row and the figures of one batch size."""
    island = experiment.island
    member = Member.resolve(MEMBER, experiment, sizes)
    cost = MemberCost(member)
    step = step_cost(member, island, cost.network)
    planned = cost.memory(island, "single").peak
    peak = peak_bytes(member, island)
    rate = samples_per_second(member, island)
    batch = member.batch_size
    figures = report.figures
    figures[f"samples_per_second_{batch}"] = rate
    figures["parameters"] = cost.num_parameters
    figures["gflop_a_sample"] = step.flops / 1e9
    figures["gb_of_weights_and_state"] = cost.state(island).training / 1e9
    figures[f"planned_gb_{batch}"] = planned / 1e9
    figures[f"peak_gb_{batch}"] = peak / 1e9
    figures[f"peak_over_planned_{batch}"] = peak / planned
    shares = ["", ""]
    if step.peak_flops is not None:
        mfu = step.flops * rate / step.peak_flops
        hfu = mfu * (1 + step.recomputed_flops / step.flops)
        figures[f"mfu_{batch}"] = mfu
        figures[f"hfu_{batch}"] = hfu
        shares = [f"{mfu:.1%}", f"{hfu:.1%}"]

    times = [f"{1000 * batch / rate:.1f}", f"{rate:,.1f}"]
    memory = [f"{planned / 1e9:.2f}", f"{peak / 1e9:.2f}"]
    report.row(str(batch), *times, *shares, *memory)
    report.notes = [f"{cost.num_parameters / 1e6:,.2f} M parameters; {step.line}"]


if __name__ == "__main__":
    run(main)
