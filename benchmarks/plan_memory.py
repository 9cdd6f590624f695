"""Memory of the command ``plan`` against what members hold in training on a CPU.

Members train for a few steps with Lightning's Trainer, on random data. Torch's profiler counts what its CPU allocator
holds, from before the network is built to the end: weights, gradients, optimizer, averages, batches and all else.

    python benchmarks/plan_memory.py --json benchmarks/results/plan_memory.json
"""

from __future__ import annotations

from collections.abc import Sequence

from common import MEMBER, Report, load, parse, parser, run
from step_memory import peak_bytes

from ddm_lightning.islands.plan import Planner, rates_of
from ddm_lightning.islands.plan_data import data_of

DIT = "expert.network={{name: dit, params: {{width: {}, depth: {}, num_heads: 4, patch_size: 2{}}}}}"
EXPERT = DIT.format(256, 6, "")
SETTINGS = (
    "prepare.source.params={num_samples: 96, image_size: 16}",
    "expert.train.global_batch_size=16",
    "router.train.global_batch_size=8",
    "island.accelerator=cpu",
    "island.num_threads=1",
)
"""Of ``tiny_2x.yaml``: images of 16 x 16 pixels."""
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
    for name in QUICK if options.quick else CASES:
        member = "router" if name == "router" else MEMBER
        experiment = load(options, *SETTINGS, *CASES[name])
        planner = Planner(experiment, [member], data_of(experiment), rates_of(None, ()))
        planned = planner.on(None).members[0].memory.peak
        held = peak_bytes(planner.members[0], experiment.island)
        ratio = held / planned
        errors.append(abs(ratio - 1))
        report.figures[f"held_over_planned_{name}"] = ratio
        title = f"{name}: {member}, {', '.join(CASES[name])}"
        report.row(title, f"{planned / 1e6:.3f}", f"{held / 1e6:.3f}", f"{ratio:.3f}")

    report.figures["largest_error"] = max(errors)
    report.finish(options.json)


if __name__ == "__main__":
    run(main)
