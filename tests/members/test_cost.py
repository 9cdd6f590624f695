"""What a member costs, and what is said of it."""

from types import SimpleNamespace

import pytest

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.members import cost


@pytest.mark.parametrize(
    ("island", "peak", "line"),
    [
        (IslandConfig("cpu", 2), None, "the peak of this CPU is not known, so no MFU is shown"),
        (
            IslandConfig("gpu", 8, precision="bf16-mixed"),
            8 * 989.4e12,
            "MFU against 8 x 989.4 TFLOP/s of NVIDIA H200 in bf16-mixed",
        ),
    ],
)
def test_the_line_of_the_cost_names_the_device_and_sums_the_peaks(monkeypatch, island, peak, line):
    monkeypatch.setattr(cost, "flops_per_sample", lambda *_, **__: 2.5e9)
    if island.accelerator == "gpu":
        monkeypatch.setattr(cost, "peak_of_this_device", lambda *_: ("NVIDIA H200", 989.4))
    member = SimpleNamespace(x_shape=None, condition=None)
    found = cost.step_cost(member, island, None)
    assert (found.flops, found.recomputed_flops, found.peak_flops) == (2.5e9, 0, pytest.approx(peak) if peak else None)
    assert found.line == f"2.5 GFLOP per sample; {line}"
