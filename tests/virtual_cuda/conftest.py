"""Every command, run once on the virtual CUDA device for the tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import TINY
from virtual_cuda.runs import Command, Ran, run

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
    "expert.overrides={expert-2: {train: {optimizer: muon, horizontal_flip: true}}}",
    "router.train.max_steps=12",
    "evaluate.num_images=8",
    "sample.num_steps=3",
    "sample.num_per_prompt=2",
)
RUN = pytest.StashKey[list[Ran]]()


def commands(run_dir: Path) -> list[Command]:
    """Every way to train and to use a run."""

    def command(name: str, *more: str, **numbers: int) -> Command:
        return Command([name, *more], ["-c", str(TINY), f"run_dir={run_dir}", *SETTINGS], **numbers)

    guided, exact = "sample.guidance_scale=2", ("sample.precision=32-true", "--seed", "1")
    return [
        command("prepare"),
        command("fit", "member=expert-0", "island.precision=bf16-mixed", stop_at=5, code=130),
        command("fit", "member=expert-0", "island.precision=bf16-mixed"),
        command("fit", "member=expert-1", "island.micro_batch_size=3", "island.num_workers=1"),
        command("fit", "member=expert-2", "island.activation_checkpointing=true"),
        command("fit", "member=router", "island.precision=16-mixed"),
        command("fit", "member=monolith"),
        command("fit"),  # all are trained: assemble, and draw the grid
        command("fit", "member=student"),
        *(command("sample", "--strategy", name) for name in STRATEGIES.names()),
        *(command("sample", f"sample.solver={name}") for name in SOLVERS.names()),
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
    ]


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of all commands."""
    return tmp_path_factory.mktemp("virtual_cuda") / "run"


@pytest.fixture(scope="session")
def everything(run_dir: Path, pytestconfig: pytest.Config) -> list[Ran]:
    """What every command did."""
    found = run(commands(run_dir), probe="virtual_cuda.probes:watch")
    pytestconfig.stash[RUN] = found
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show how often each command waits for the device and copies."""
    if found := config.stash.get(RUN, None):
        terminalreporter.section("on the virtual CUDA device")
        for name in dict.fromkeys(ran.name for ran in found):
            terminalreporter.write_line(summary(name, [ran for ran in found if ran.name == name]))
        terminalreporter.write_line(summary("all", found))


def summary(name: str, found: list[Ran]) -> str:
    """One line of totals."""
    kinds = dict.fromkeys(("wait", "blocking upload", "staged upload", "upload", "download"), 0)
    for ran in found:
        for (kind, _), number in ran.counts.items():
            kinds[kind] += number
    operations, steps = sum(ran.num_operations for ran in found), sum(len(ran.steps) for ran in found)
    events = ", ".join(f"{number} {kind}s" for kind, number in kinds.items())
    return f"{name}: {len(found)} commands, {operations} operations, {steps} training steps; {events}"
