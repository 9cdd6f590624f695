"""Scores during training: they are logged, right, and change no weight."""

import csv

import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import TINY
from torchmetrics import Metric

from ddm_lightning.cli.parser import main
from ddm_lightning.core.registry import METRICS

pytestmark = WARNINGS

SETTINGS = (
    "expert.train.max_steps=8",
    "island.validate_every_n_steps=4",
    "island.log_every_n_steps=4",
    "island.loggers=[csv]",
    "evaluate.metrics=[{name: kid, params: {features: pixels}}, {name: count}]",
    "expert.train.global_batch_size=8",
    "evaluate.num_images=6",
)


class Count(Metric):
    """Number of generated images."""

    def __init__(self):
        super().__init__()
        self.add_state("num", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, images, *, real):
        self.num += 0 if real else len(images)

    def compute(self):
        return self.num


@pytest.fixture(autouse=True)
def _count(monkeypatch):
    monkeypatch.setitem(METRICS._built_in, "count", Count)


def fit(run, *more):
    assert main(["fit", "-c", str(TINY), f"run_dir={run}", "member=expert-0", *SETTINGS, *more]) == 0
    member = run / "members" / "expert-0"
    (curves,) = (member / "csv").rglob("metrics.csv")
    with curves.open(encoding="utf-8") as stream:
        return (member / "artifact" / "model.safetensors").read_bytes(), list(csv.DictReader(stream))


def test_scores_are_logged_and_weights_stay_bit_identical(tiny_run, tmp_path, capsys):
    import shutil

    other = shutil.copytree(tiny_run, tmp_path / "other")
    weights, curves = fit(tiny_run)
    scored, scores = fit(other, "island.evaluate_every_n_steps=4")
    assert weights == scored
    assert not any(name.startswith("score/") for row in curves for name in row)
    found = [row for row in scores if row.get("score/KID (pixels)")]
    assert [row["step"] for row in found] == ["4", "8"]
    assert all(0 < float(row["score/KID (pixels)"]) < 100 for row in found)
    assert [float(row["score/count"]) for row in found] == [6, 6]  # of batches of 4
    assert "no scores" not in capsys.readouterr().err


def test_scores_need_a_validation_at_their_steps(tiny_run, capsys):
    settings = ["-c", str(TINY), f"run_dir={tiny_run}", "member=expert-0", *SETTINGS]
    assert main(["fit", *settings, "island.evaluate_every_n_steps=6"]) == 2
    assert "'island.evaluate_every_n_steps' = 6: must be a multiple of island.validate" in capsys.readouterr().err
    missing = "evaluate.metrics=[{name: kid, params: {features: inception, features_params: {path: none.pt}}}]"
    assert main(["fit", *settings, "island.evaluate_every_n_steps=4", missing]) == 2
    assert "none.pt: the weights of 'inception'" in capsys.readouterr().err
    assert not (tiny_run / "experiment.yaml").exists()
