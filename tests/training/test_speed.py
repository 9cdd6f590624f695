import contextlib
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.devices import tf32
from ddm_lightning.members import cost
from ddm_lightning.members.cost import StepCost, step_cost
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.training import module
from ddm_lightning.training.module import Speed
from ddm_lightning.training.objective import build_objective


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now.seconds)
    return now


def take(measured, clock, steps, wait, work):
    for _ in range(steps):
        clock.seconds += wait
        measured.end_wait()
        clock.seconds += work
        measured.begin_wait()


def test_rates_are_of_the_time_since_the_last_report_without_validation(clock):
    measured = Speed(32, StepCost(flops=2e9, recomputed_flops=1e9, peak_flops=1e12))
    measured.start(7)
    take(measured, clock, 4, wait=0.5, work=1.5)
    measured.pause()
    clock.seconds += 1000
    measured.resume()
    take(measured, clock, 1, wait=0.5, work=1.5)
    figures = measured.read(12)

    # The first batch was waited for before the first step ended; that wait nobody counts.
    assert figures["train/samples_per_second"] == pytest.approx(5 * 32 / 10)
    assert figures["train/data_wait"] == pytest.approx(4 * 0.5 / 10)
    assert figures["train/mfu"] == pytest.approx(16 * 2e9 / 1e12)
    assert figures["train/hfu"] == pytest.approx(16 * 3e9 / 1e12)

    take(measured, clock, 2, wait=1.0, work=1.0)
    figures = measured.read(14)

    assert figures["train/samples_per_second"] == pytest.approx(16) and figures["train/data_wait"] == pytest.approx(0.5)
    assert measured.read(14) == {}, "no step was taken"


@pytest.mark.parametrize(("checkpointed", "forward_passes"), [("false", 3), ("true", 4)])
def test_a_forward_pass_counts_once_more_in_hfu_where_it_is_computed_twice(
    tiny_prepared, clock, monkeypatch, checkpointed, forward_passes
):
    """A backward pass costs as much as two forward passes."""
    monkeypatch.setattr(cost, "peak_of_this_device", lambda *_: ("some device", 1.0))
    experiment = load_experiment(TINY, [f"island.activation_checkpointing={checkpointed}"])
    run = Run(experiment, RunFolder(tiny_prepared.parent))
    member = run.member("expert-0")
    measured = Speed(8, step_cost(member, experiment.island, build_objective(member, run).network))
    measured.start(0)
    take(measured, clock, 1, wait=0.5, work=0.5)
    figures = measured.read(1)

    assert figures["train/hfu"] / figures["train/mfu"] == pytest.approx(forward_passes / 3, rel=0.02)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_tensorfloat_32_is_allowed_within_a_block_alone(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    before = torch.get_float32_matmul_precision()
    with contextlib.suppress(KeyError), tf32():
        within = torch.get_float32_matmul_precision()
        raise KeyError

    assert (within, torch.get_float32_matmul_precision()) == ("high" if has_gpu else before, before)
    assert before == "highest"
