"""Memory of the command ``plan`` against what members hold in training on a CPU, each in a process of its own.

Members train for three steps with the Trainer of ``fit``. Torch's profiler counts what its CPU allocator holds, from
before the network is built to the end of the last step: weights, gradients, optimizer, averages, batches and all else.

    python benchmarks/plan_memory.py --json benchmarks/results/plan_memory.json
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from common import MEMBER, Report, call, load, parse, parser, run
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from step_loops import our_trainer
from step_memory import most_allocated
from torch.profiler import ProfilerActivity, profile

from ddm_lightning.islands.plan import Planner, rates_of
from ddm_lightning.islands.plan_data import data_of

STEPS = 3
DIT = "expert.network={{name: dit, params: {{width: {}, depth: {}, num_heads: 4, patch_size: 2{}}}}}"
EXPERT = DIT.format(256, 6, "")
SETTINGS = (
    "prepare.source.params={num_samples: 96, image_size: 16}",
    f"expert.train.max_steps={STEPS + 1}",
    f"router.train.max_steps={STEPS + 1}",
    "expert.train.global_batch_size=16",
    "router.train.global_batch_size=8",
    "island.accelerator=cpu",
    "island.loggers=[]",
)
"""Of ``tiny_2x.yaml``: images of 16 x 16 pixels, and no validation before the last step."""
CASES = {
    "expert": (EXPERT,),
    "checkpointing": (EXPERT, "island.activation_checkpointing=true"),
    "bfloat16": (DIT.format(256, 6, ", qk_norm: true, mlp: swiglu"), "island.precision=bf16-mixed"),
    "widths": (EXPERT, "island.micro_batch_size=4", "expert.train.ema_widths=[0.05, 0.1]"),
    "muon": (DIT.format(384, 8, ""), "expert.train.optimizer=muon", "expert.train.global_batch_size=4"),
    "compiled": (EXPERT, "island.compile=true", "island.precision=bf16-mixed"),
    "router": ("router.network={name: router-dit, params: {width: 192, depth: 6, num_heads: 4, patch_size: 2}}",),
}
"""Settings by name; all but ``router`` train an expert."""
QUICK = ("checkpointing", "router")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    report = Report("Memory of a training on a CPU", ["", "planned, MB", "held, MB", "ratio"])
    errors = []
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        settings = [f"run_dir={folder}", *SETTINGS]
        call("prepare", options, *settings)
        for name in QUICK if options.quick else CASES:
            errors.append(abs(add(report, options, settings, name) - 1))

    report.figures["largest_error"] = max(errors)
    report.finish(options.json)


def add(report: Report, options: Namespace, settings: Sequence[str], name: str) -> float:
    """Add the row and the figures of one case; return what is held over what is planned."""
    member = "router" if name == "router" else MEMBER
    own = CASES[name]
    settings = [*settings, *own]
    experiment = load(options, *settings)
    planner = Planner(experiment, [member], data_of(experiment), rates_of(None, ()))
    planned = planner.on(None).members[0].memory.peak
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        held = pool.submit(held_in_training, options, settings, member).result()

    ratio = held / planned
    report.figures[f"held_over_planned_{name}"] = ratio
    title = f"{name}: {member}, {', '.join(own)}"
    report.row(title, f"{planned / 1e6:.3f}", f"{held / 1e6:.3f}", f"{ratio:.3f}")
    return ratio


def held_in_training(options: Namespace, settings: Sequence[str], member: str) -> int:
    """Train for ``STEPS`` steps and return the most bytes that torch's allocator held."""
    torch.set_num_threads(1)
    profiled = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiled.start()

    def stop(trainer: Trainer, _module: LightningModule, *_: Any) -> None:
        """Stop before the copy of a checkpoint after the last step: a GPU does not hold it."""
        if trainer.global_step == STEPS:
            profiled.stop()

    trainer, module, data = our_trainer(load(options, *settings), member)
    trainer.callbacks.insert(0, LambdaCallback(on_train_batch_end=stop))  # type: ignore[attr-defined]  # Lightning's list
    trainer.fit(module, datamodule=data)
    return most_allocated(profiled)


if __name__ == "__main__":
    run(main)
