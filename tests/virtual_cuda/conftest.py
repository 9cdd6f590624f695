"""Every command, run once on the virtual CUDA device for the tests here."""

from __future__ import annotations

import itertools

import pytest
from tiny_runs import TINY, bucket_settings, write_shapes
from virtual_cuda.runs import Command, run

from ddm_lightning.core.registry import SOLVERS, STRATEGIES

SETTINGS = (
    "prepare.partition.num_clusters=3",
    "prepare.partition.device=cuda",
    "island.accelerator=gpu",
    "island.log_every_n_steps=4",
    "island.checkpoint_every_n_steps=6",
    "island.validate_every_n_steps=9",
    "expert.train.max_steps=12",
    "expert.train.global_batch_size=12",
    "expert.train.ema_widths=[0.1]",
    "expert.train.ema_snapshots=2",
    "expert.overrides.expert-1={train: {optimizer: adamw-8bit}}",
    "expert.overrides.expert-2={train: {optimizer: muon, horizontal_flip: true}}",
    "router.train.max_steps=12",
    "router.train.optimizer=adamw-8bit",
    "evaluate.num_images=8",
    "sample.num_steps=3",
    "sample.num_per_prompt=2",
)


def strategies_with_solvers():
    """Every strategy and every solver, in few pairs."""
    solvers = itertools.cycle(SOLVERS.names())
    for name in STRATEGIES.names():
        own = STRATEGIES.build(name, {}).solvers
        yield "--strategy", name, f"sample.solver={own[0] if own else next(solvers)}"


def commands(run_dir):
    """Every way to train and to use a run."""

    def command(name: str, *more: str, **numbers: int) -> Command:
        return Command([name, *more], ["-c", str(TINY), f"run_dir={run_dir}", *SETTINGS], **numbers)

    shapes = run_dir.with_name("shapes")
    write_shapes(shapes / "images")
    in_buckets = (f"run_dir={shapes}", *bucket_settings(shapes / "images"))
    guided = "sample.guidance_scale=2"
    exact = ("sample.precision=32-true", "--seed", "1")
    return [
        command("prepare"),
        command("fit", "member=expert-0", "island.precision=bf16-mixed", "island.ema=host", stop_at=5, code=130),
        command("fit", "member=expert-0", "island.precision=bf16-mixed", "island.ema=host"),
        command(
            "fit",
            "member=expert-1",
            "island.micro_batch_size=3",
            "islands.expert-1.precision=bf16-true",
            "island.num_workers=1",
        ),
        command("fit", "member=expert-2", "island.activation_checkpointing=true"),
        command("fit", "member=router", "island.precision=16-mixed"),
        command("fit", "member=monolith"),
        command("fit"),  # all are trained: assemble, and draw the grid
        command("fit", "member=student"),
        *(command("sample", *pair) for pair in strategies_with_solvers()),
        command("sample", guided, "sample.guidance=expert"),
        command("sample", guided, "sample.guidance=mixture", "sample.guidance_interval=[0.2,0.9]"),
        command("sample", "sample.strategy=full", "sample.resident_experts=2"),
        command("sample", "sample.member=student", "--gif"),
        command("sample", *exact, "island.accelerator=gpu", "--out", str(run_dir / "gpu.png")),
        command("sample", *exact, "island.accelerator=cpu", "--out", str(run_dir / "cpu.png")),
        command("evaluate"),
        command("diagnose", "--num", "8"),
        command("replay", "member=monolith"),
        command("ema", "member=expert-0"),
        command("ema", "member=expert-0", "--use", "0.1"),
        command("prepare", *in_buckets),
        command("fit", *in_buckets, "member=expert-1"),
        command("sample", *in_buckets, "sample.member=expert-1", "--size", "4x16", "--size", "16x4"),
    ]


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """The run folder of all commands."""
    return tmp_path_factory.mktemp("virtual_cuda") / "run"


@pytest.fixture(scope="session")
def everything(run_dir):
    """What every command did."""
    return run(commands(run_dir), probe="virtual_cuda.probes:watch")
