from types import SimpleNamespace

import pytest
from tiny_runs import TINY

from ddm_lightning.config import load_experiment
from ddm_lightning.core.devices import peak_of_this_device, peak_tflops
from ddm_lightning.members.member import Member
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.shards.manifest import Manifest
from ddm_lightning.training import speed
from ddm_lightning.training.checkpoint.rolling import RollingCheckpoints
from ddm_lightning.training.fit import _cost, build_module, build_trainer
from ddm_lightning.training.parallel.strategy import choose_strategy
from ddm_lightning.training.speed import Speed, StepCost, peak_memory_bytes


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now.seconds)
    return now


def take(callback, clock, steps, wait, work):
    for _ in range(steps):
        clock.seconds += wait
        callback.on_train_batch_start()
        clock.seconds += work
        callback.on_train_batch_end()


def test_rates_are_of_the_time_since_the_last_report_without_validation(clock):
    callback = Speed(32, StepCost(flops=2e9, recomputed_flops=1e9, peak_flops=1e12))
    callback.on_train_start(SimpleNamespace(global_step=7), None)
    take(callback, clock, 4, wait=0.5, work=1.5)
    callback.on_validation_start()
    clock.seconds += 1000
    callback.on_validation_end()
    take(callback, clock, 1, wait=0.5, work=1.5)
    figures = callback.read(12)
    # The first batch was waited for before the first step ended; that wait nobody counts.
    assert figures["train/samples_per_second"] == pytest.approx(5 * 32 / 10)
    assert figures["train/data_wait"] == pytest.approx(4 * 0.5 / 10)
    assert figures["train/mfu"] == pytest.approx(16 * 2e9 / 1e12)
    assert figures["train/hfu"] == pytest.approx(16 * 3e9 / 1e12)
    take(callback, clock, 2, wait=1.0, work=1.0)
    figures = callback.read(14)
    assert figures["train/samples_per_second"] == pytest.approx(16) and figures["train/data_wait"] == pytest.approx(0.5)
    assert callback.read(14) == {}, "no step was taken"


@pytest.mark.parametrize(("checkpointed", "forward_passes"), [("false", 3), ("true", 4)])
def test_a_forward_pass_counts_once_more_in_hfu_where_it_is_computed_twice(
    tiny_prepared, clock, monkeypatch, checkpointed, forward_passes
):
    """A backward pass costs as much as two forward passes."""
    monkeypatch.setattr(speed, "peak_of_this_device", lambda *_: ("some device", 1.0))
    experiment = load_experiment(TINY, [f"island.activation_checkpointing={checkpointed}"])
    manifest = Manifest.read(tiny_prepared.parent)
    member = Member.resolve("expert-0", experiment, manifest)
    cost, _ = _cost(build_module(member, experiment.island, manifest))
    callback = Speed(8, cost)
    callback.on_train_start(SimpleNamespace(global_step=0), None)
    take(callback, clock, 1, wait=0.5, work=0.5)
    figures = callback.read(1)
    assert figures["train/hfu"] / figures["train/mfu"] == pytest.approx(forward_passes / 3, rel=0.02)


def test_without_a_known_peak_there_is_no_mfu(clock):
    callback = Speed(32, StepCost(flops=2e9, recomputed_flops=0, peak_flops=None))
    callback.on_train_start(SimpleNamespace(global_step=0), None)
    take(callback, clock, 1, wait=0.5, work=0.5)
    assert callback.read(1).keys() == {"train/samples_per_second", "train/data_wait", "train/memory_gb"}


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", False, 989.4),
        ("NVIDIA H100 PCIe", "bf16-mixed", False, 756.0),
        ("NVIDIA H200", "16-mixed", False, 989.4),
        ("NVIDIA H200 NVL", "bf16-mixed", False, 835.5),
        ("NVIDIA GB200", "bf16-mixed", False, 2500.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed", False, None),
        ("NVIDIA A100-SXM4-80GB", "32-true", True, 156.0),
        ("NVIDIA A100-SXM4-80GB", "32-true", False, 19.5),
        ("NVIDIA A40", "bf16-mixed", False, 149.7),
        ("NVIDIA L40S", "bf16-mixed", False, 362.0),
        ("NVIDIA L4", "bf16-mixed", False, 121.0),
        ("NVIDIA H100 80GB HBM3", "64-true", False, None),
        ("NVIDIA RTX A4000", "bf16-mixed", False, None),
        ("Some Other Device", "bf16-mixed", False, None),
    ],
)
def test_peaks_are_dense_and_unknown_devices_have_none(name, precision, tf32, expected):
    assert peak_tflops(name, precision, tf32=tf32) == expected


def test_a_cpu_has_no_peak_and_the_line_says_so():
    assert peak_of_this_device("cpu", "bf16-mixed") == ("this CPU", None)
    cost, line = StepCost.of(2.5e9, 0, "cpu", "32-true", 2)
    assert cost == StepCost(2.5e9, 0, None)
    assert line == "2.5 GFLOP a sample; the peak of this CPU is not known, so no MFU is shown"


def test_the_peak_of_several_devices_is_their_sum(monkeypatch):
    monkeypatch.setattr(speed, "peak_of_this_device", lambda *_: ("NVIDIA H200", 989.4))
    cost, line = StepCost.of(1e12, 0, "gpu", "bf16-mixed", 8)
    assert cost.peak_flops == pytest.approx(8 * 989.4e12)
    assert line == "1000 GFLOP a sample; MFU against 8 x 989.4 TFLOP/s of NVIDIA H200 in bf16-mixed"


def test_peak_memory_is_of_this_process():
    before = peak_memory_bytes()
    assert 1e8 < before < 1e11
    block = bytearray(300 * 1024**2)
    block[::4096] = b"x" * len(block[::4096])
    assert peak_memory_bytes() >= before


def test_time_that_a_checkpoint_takes_is_no_wait_for_data(tiny_prepared, tmp_path):
    """Lightning puts its own kind of checkpoints behind all other callbacks."""
    experiment = load_experiment(TINY, [])
    member = Member.resolve("expert-0", experiment, Manifest.read(tiny_prepared.parent))
    strategy, _ = choose_strategy(experiment.island, 1000)
    trainer, _ = build_trainer(member, experiment, tmp_path, MemberStatus("expert-0", 40), strategy)
    kinds = [type(callback) for callback in trainer.callbacks]
    assert kinds.index(RollingCheckpoints) < kinds.index(Speed)
