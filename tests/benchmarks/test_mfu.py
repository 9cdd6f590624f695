import mfu
import pytest
import torch
from common import MEMBER, Report
from step_member import TrainingStep
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.shards.manifest import DataSizes

CPU = torch.device("cpu")


def measured(*overrides):
    report = Report("", [""] * 7)
    experiment = load_experiment(TINY, ["expert.train.global_batch_size=8", *overrides])
    mfu.add(report, experiment, 4, CPU, 1, DataSizes((3, 8, 8), 16, (4, 16), 4))
    return report


def test_shares_are_of_the_named_peak_and_recomputation_counts_in_hfu_alone(monkeypatch):
    monkeypatch.setattr(mfu, "peak_of_this_device", lambda *_: ("A100", 2e-6))

    figures = measured("island.activation_checkpointing=true").figures

    rate = figures["gflop_a_sample"] * 1e9 * figures["samples_per_second_4"]
    assert figures["mfu_4"] == pytest.approx(rate / 2e6)
    assert figures["hfu_4"] / figures["mfu_4"] == pytest.approx(4 / 3, rel=0.02)
    assert figures["samples_per_second_4"] == pytest.approx(4 / figures["seconds_4"])
    assert figures["gb_of_weights_and_state"] == pytest.approx(20e-9 * figures["parameters"])


def test_of_an_unknown_device_there_is_no_share():
    report = measured()

    assert "mfu_4" not in report.figures
    assert "no MFU is shown" in report.notes[0]


def weights_after(*overrides):
    step = TrainingStep(MEMBER, load_experiment(TINY, overrides), DataSizes((3, 8, 8), 16, None, 4), CPU)
    for _ in range(3):
        step.take()
    return torch.cat([parameter.detach().flatten() for parameter in step.parameters])


@pytest.fixture(scope="module")
def weights():
    return weights_after()


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("island.micro_batch_size=3", False),
        ("island.activation_checkpointing=true", False),
        ("expert.train.ema_widths=[0.1]", False),
        ("expert.train.optimizer=muon", True),
        ("island.precision=bf16-mixed", True),
        ("expert.train.weight_decay=10", True),
    ],
)
def test_what_saves_memory_changes_nothing_but_rounding_and_options_change_the_weights(weights, key, changes):
    assert torch.allclose(weights_after(key), weights, rtol=0, atol=1e-6) != changes


def test_a_precision_that_takes_a_scaler_is_refused():
    with pytest.raises(UserError, match=r"'island.precision' = '16-mixed': .*32-true and bf16-mixed"):
        weights_after("island.precision=16-mixed")
