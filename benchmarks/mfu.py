"""Training speed of an experiment's expert on one device: samples per second, MFU, HFU, planned and measured memory.

Measures the whole step except loading and noise, on random latents of 4 x 32 x 32 and 77 text tokens, with the
experiment's precision, compilation and activation checkpointing. Needs no data.

    python benchmarks/mfu.py -c experiments/laion_24b.yaml --batch 8 --json benchmarks/results/mfu_laion_24b.json
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from common import MEMBER, Report, device_of, load, parse, parser, run
from step_clock import median
from step_member import TrainingStep, measured
from step_memory import peak_bytes
from step_networks import in_turn

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import processes
from ddm_lightning.core.devices import peak_of_this_device
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.cost import MemberCost
from ddm_lightning.shards.manifest import DataSizes

LATENTS = DataSizes((4, 32, 32), 768, (77, 768), 1000)
"""Sizes of 256 x 256 images encoded by Stable Diffusion's VAE, and of captions encoded by CLIP ViT-L/14."""
ROUNDS = 20
QUICK_ROUNDS = 3
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
        if batch < 1:
            raise UserError(f"--batch {batch}: must be at least 1")

        settings = ("island.devices=1", "island.strategy=auto")
        total = batch * own.prepare.partition.num_clusters
        experiment = load(options, f"expert.train.global_batch_size={total}", *settings)
        try:
            add(report, experiment, batch, device, QUICK_ROUNDS if options.quick else ROUNDS)
        except torch.OutOfMemoryError:
            report.row(str(batch), "out of memory", *[""] * 5)

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
    step, _ = measured(partial(TrainingStep, MEMBER, experiment, sizes, device))
    cost = MemberCost(step.member)
    peak = peak_bytes(step)
    planned = cost.memory(step.island, "single").peak
    seconds = median(in_turn({"step": step}, num_rounds, STEPS_PER_TURN)["step"])
    described, peak_flops = peak_of_this_device("gpu" if device.type == "cuda" else "cpu", experiment.island.precision)
    report.figures |= {
        f"samples_per_second_{batch}": batch / seconds,
        f"seconds_{batch}": seconds,
        "parameters": step.num_parameters,
        "gflop_a_sample": step.model_flops / 1e9,
        "gb_of_weights_and_state": cost.state.training / 1e9,
        f"planned_gb_{batch}": planned / 1e9,
        f"peak_gb_{batch}": peak / 1e9,
        f"peak_over_planned_{batch}": peak / planned,
    }
    shares = ["", ""]
    if peak_flops is not None:
        report.figures |= {
            f"mfu_{batch}": step.model_flops * batch / seconds / (peak_flops * 1e12),
            f"hfu_{batch}": step.flops * batch / seconds / (peak_flops * 1e12),
        }
        shares = [f"{report.figures[f'{name}_{batch}']:.1%}" for name in ("mfu", "hfu")]

    memory = [f"{planned / 1e9:.2f}", f"{peak / 1e9:.2f}"]
    report.row(str(batch), f"{1000 * seconds:.1f}", f"{batch / seconds:,.1f}", *shares, *memory)
    if peak_flops is None:
        known = "peak not known, so no MFU is shown."
    else:
        known = f"peak {peak_flops:g} TFLOP/s."

    size = f"{step.num_parameters / 1e6:,.2f} M parameters, {step.model_flops / 1e9:,.1f} GFLOP per sample"
    line = f"{size}; {described}: {known}"
    if line not in report.notes:
        report.note(line)


if __name__ == "__main__":
    run(main)
