import mfu
import pytest
from common import Report
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.members import cost
from ddm_lightning.shards.manifest import DataSizes
from ddm_lightning.training import measure


@pytest.fixture(autouse=True)
def two_steps(monkeypatch):
    monkeypatch.setattr(measure, "_SECONDS", 0.0)


def measured(*overrides):
    report = Report("", [""] * 7)
    experiment = load_experiment(TINY, ["expert.train.global_batch_size=8", "island.accelerator=cpu", *overrides])
    mfu.add(report, experiment, DataSizes((3, 8, 8), 16, (4, 16), 4))
    return report


def test_shares_are_of_the_named_peak_and_recomputation_counts_in_hfu_alone(monkeypatch):
    monkeypatch.setattr(cost, "peak_of_this_device", lambda *_: ("A100", 2e-6))

    figures = measured("island.activation_checkpointing=true").figures

    rate = figures["gflop_a_sample"] * 1e9 * figures["samples_per_second_4"]
    assert figures["mfu_4"] == pytest.approx(rate / 2e6)
    assert figures["hfu_4"] / figures["mfu_4"] == pytest.approx(4 / 3, rel=0.02)
    assert figures["gb_of_weights_and_state"] == pytest.approx(20e-9 * figures["parameters"])


def test_of_an_unknown_device_there_is_no_share():
    report = measured()

    assert "mfu_4" not in report.figures
    assert "no MFU is shown" in report.notes[0]
