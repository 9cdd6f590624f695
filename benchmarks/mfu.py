"""Training speed of an experiment's expert on one device: samples per second, MFU, HFU, planned and measured memory.

Measures the whole step except loading and noise, on random latents of 4 x 32 x 32 and 77 text tokens, with the
experiment's precision, compilation and activation checkpointing. Needs no data.

    python benchmarks/mfu.py -c experiments/laion_24b.yaml --batch 8 --json benchmarks/results/mfu_laion_24b.json
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from common import MEMBER, Report, device_of, load, parse, parser, run
from step_clock import in_turn, median
from step_member import TrainingStep
from step_memory import peak_bytes

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import processes
from ddm_lightning.core.devices import peak_of_this_device
from ddm_lightning.members.cost import MemberCost
from ddm_lightning.shards.manifest import DataSizes

LATENTS = DataSizes((4, 32, 32), 768, (77, 768), 1000)
"""Sizes of 256 x 256 images encoded by Stable Diffusion's VAE, and of captions encoded by CLIP ViT-L/14."""
ROUNDS = (20, 3)
"""In all, and with ``--quick``."""
STEPS_PER_TURN = 5


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    processes.begin()
    processes.end_imports()
    cli = parser(__doc__ or "", device=True)
    cli.add_argument(
        "--batch", type=int, nargs="+", default=[32], help="samples per step; several are measured in turn"
    )
    options = parse(cli, arguments)
    device = device_of(options)
    own = load(options)
    report = Report(
        f"{MEMBER} of {own.name} on one {device.type} device, {own.island.precision}",
        ["samples per step", "ms per step", "samples/s", "MFU", "HFU", "planned, GB", "peak, GB"],
    )
    for batch in options.batch:
        total = batch * own.prepare.partition.num_clusters
        settings = (f"expert.train.global_batch_size={total}", "island.devices=1", "island.strategy=auto")
        try:
            add(report, load(options, *settings), batch, device, ROUNDS[options.quick])
        except torch.OutOfMemoryError:
            report.row(str(batch), "out of memory", *[""] * 5)

        # Remove the remains of the step.
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    report.finish(options.json)


def add(
    report: Report,
    experiment: Experiment,
    batch: int,
    device: torch.device,
    num_rounds: int,
    sizes: DataSizes = LATENTS,
) -> None:
    """Add the row and the figures of one batch size."""
    step = TrainingStep(MEMBER, experiment, sizes, device)
    step.take()  # creates moments and averages
    peak = peak_bytes(step)
    cost = MemberCost(step.member)
    planned = cost.memory(step.island, "single").peak
    seconds = median(in_turn({"step": step.take}, device, num_rounds, STEPS_PER_TURN)["step"])
    flops = step.cost.flops
    figures = report.figures
    figures[f"samples_per_second_{batch}"] = batch / seconds
    figures[f"seconds_{batch}"] = seconds
    figures["parameters"] = cost.num_parameters
    figures["gflop_a_sample"] = flops / 1e9
    figures["gb_of_weights_and_state"] = cost.state(step.island).training / 1e9
    figures[f"planned_gb_{batch}"] = planned / 1e9
    figures[f"peak_gb_{batch}"] = peak / 1e9
    figures[f"peak_over_planned_{batch}"] = peak / planned
    described, tflops = peak_of_this_device("gpu" if device.type == "cuda" else "cpu", experiment.island.precision)
    shares = ["", ""]
    known = "peak not known, so no MFU is shown."
    if tflops is not None:
        rate = batch / seconds / (tflops * 1e12)
        mfu = flops * rate
        hfu = (flops + step.cost.recomputed_flops) * rate
        figures[f"mfu_{batch}"] = mfu
        figures[f"hfu_{batch}"] = hfu
        shares = [f"{mfu:.1%}", f"{hfu:.1%}"]
        known = f"peak {tflops:g} TFLOP/s."

    times = [f"{1000 * seconds:.1f}", f"{batch / seconds:,.1f}"]
    report.row(str(batch), *times, *shares, f"{planned / 1e9:.2f}", f"{peak / 1e9:.2f}")
    size = f"{cost.num_parameters / 1e6:,.2f} M parameters, {flops / 1e9:,.1f} GFLOP per sample"
    report.notes = [f"{size}; {described}: {known}"]


if __name__ == "__main__":
    run(main)
