import mfu
import pytest
import torch
from common import MEMBER, Report
from step_member import TrainingStep
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.shards.manifest import DataSizes

SIZES = DataSizes((3, 8, 8), 16, (4, 16), 4)


def measured(*overrides):
    report = Report("", [""] * 7)
    experiment = load_experiment(TINY, ["expert.train.global_batch_size=8", *overrides])
    mfu.add(report, experiment, 4, torch.device("cpu"), 1, SIZES)
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
    assert not any(name.startswith(("mfu", "hfu")) for name in report.figures)
    assert "no MFU is shown" in report.notes[0]


def step_of(*overrides):
    return TrainingStep(
        MEMBER, load_experiment(TINY, overrides), DataSizes((3, 8, 8), 16, None, 4), torch.device("cpu")
    )


def weights_after(step, num_steps=3):
    for _ in range(num_steps):
        step.take()
    return torch.cat([parameter.detach().flatten() for parameter in step.parameters])


def test_a_step_trains_and_follows_its_settings():
    """What saves memory changes nothing but rounding; what is an option of its own changes the weights."""
    whole = weights_after(step_of())
    for key in ("island.micro_batch_size=3", "island.activation_checkpointing=true", "expert.train.ema_widths=[0.1]"):
        assert torch.allclose(weights_after(step_of(key)), whole, rtol=0, atol=1e-6), key
    for key in ("expert.train.optimizer=muon", "island.precision=bf16-mixed", "expert.train.weight_decay=10"):
        assert not torch.allclose(weights_after(step_of(key)), whole, rtol=0, atol=1e-6), key
    step = step_of("expert.train.ema_widths=[0.1]")
    step.take()
    assert {"ema", "ema_0.1"} <= step.optimizer.state[step.parameters[0]].keys()


def test_a_precision_that_takes_a_scaler_is_refused():
    with pytest.raises(UserError, match=r"'island.precision' = '16-mixed': .*32-true and bf16-mixed"):
        step_of("island.precision=16-mixed")
