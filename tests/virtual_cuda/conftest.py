"""All commands, run once on the virtual CUDA device for the tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import TINY, prepared
from virtual_cuda.runs import Command, Ran, library, run

SETTINGS = (
    "island.accelerator=gpu",
    "expert.train.max_steps=12",
    "router.train.max_steps=12",
    "expert.train.ema_widths=[0.1]",
    "expert.train.ema_snapshots=2",
    "island.log_every_n_steps=4",
    "island.checkpoint_every_n_steps=6",
    "island.validate_every_n_steps=9",
    "evaluate.num_images=8",
)


def commands(run_dir: Path) -> list[Command]:
    """Every way to train and to use a run."""

    def command(name: str, *more: str, **settings: int) -> Command:
        return Command([name, "-c", str(TINY), f"run_dir={run_dir}", *SETTINGS, *more], **settings)

    return [
        command("fit", "member=expert-0", "island.precision=bf16-mixed", stop_at=5, code=130),
        command("fit", "member=expert-0", "island.precision=bf16-mixed"),
        command("fit", "member=expert-1", "island.micro_batch_size=3"),
        command("fit", "member=router"),
        command("fit", "member=monolith", "island.evaluate_every_n_steps=9"),
        command("fit"),  # all are trained: assemble, and draw the grid
        command("fit", "member=student"),
        command("sample"),
        command("evaluate"),
        command("diagnose", "--num", "8"),
        command("ema", "member=expert-0"),
        command("ema", "member=expert-0", "--use", "0.1"),
    ]


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    """What every command did."""
    library()  # skips
    run_dir = tmp_path_factory.mktemp("virtual_cuda") / "run"
    prepared(run_dir)
    return run(commands(run_dir))
