import json

import numpy as np
import partition
import pytest

from ddm_lightning.core.errors import UserError


@pytest.mark.slow
@pytest.mark.long
def test_quick_ends_with_every_figure(tmp_path):
    pytest.importorskip("faiss")
    out = tmp_path / "partition.json"
    partition.main(["--quick", "--folder", str(tmp_path), "--json", str(out)])
    figures = json.loads(out.read_text())["figures"]
    assert set(partition.BARS) <= set(figures)
    assert figures["inertia_over_faiss"] <= partition.BARS["inertia_over_faiss"]
    assert figures["largest_over_mean"] <= partition.BARS["largest_over_mean"]
    assert figures["peak_gb"] < 1
    assert figures["inertia_over_faiss"] == pytest.approx(figures["inertia_ours"] / figures["inertia_faiss"])
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".json", ".md")] == []


def test_a_disk_too_small_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(partition.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**6}))
    with pytest.raises(UserError, match=r"3\.1 GB are needed there"):
        partition.write_features(tmp_path / "x.npy", 1_000_000, 768, np.dtype(np.float32))
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_of_rounds_and_spreads_are_shown():
    found = {"ours": [{"seconds": s} for s in (2, 3, 10)], "faiss": [{"seconds": s} for s in (1, 3, 4)]}
    assert partition._ratio(found, "seconds", "faiss") == 2
    assert partition._spread([1, 2, 9], ".1f") == "2.0 (1.0–9.0)"


def test_the_cost_model_agrees_with_a_sum_by_hand():
    # 1000 x 10 numbers of 4 bytes, 3 passes over half, and one over all: 2.5 passes.
    cost = partition.partition_cost(1000, 10, 4, 3, gflops=1e-6, disk_gb_per_s=1e-6, fit_fraction=0.5)
    assert cost.bytes == 100_000
    assert cost.seconds == pytest.approx(2.5 * 2 * 1000 * 10 * 4 / 1e3 + 100_000 / 1e3)
