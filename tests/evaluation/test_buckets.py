"""Scores and diagnosis of an ensemble of three shapes, by bucket and all together."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shards.mds import WARNINGS
from tiny_runs import TINY, bucket_experiment, copy_run, write_shapes

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.registry import FEATURES, METRICS
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.evaluation import diagnosis, image_sets
from ddm_lightning.evaluation import evaluate as evaluation
from ddm_lightning.evaluation.diagnosis import Samples, expert_figures, router_figures
from ddm_lightning.evaluation.diagnosis_report import diagnosis_table
from ddm_lightning.evaluation.image_sets import FileImages, sections
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import Manifest
from ddm_lightning.shards.mds import open_shards

pytestmark = WARNINGS
SIZES = {"4x16": (4, 16), "8x8": (8, 8), "16x4": (16, 4)}
BUCKETS = [Bucket(*size, (3, *size)) for size in SIZES.values()]
KID = "{name: kid, params: {features: pixels}}"
FD = "{name: fid, params: {features: pooled-pixels, num_groups: 2, min_images: 10}}"
SMALL = ("evaluate.num_images=40", "sample.num_steps=2")


@pytest.fixture
def run(bucket_finished, tmp_path, monkeypatch):
    monkeypatch.setattr(image_sets, "PART_SIZE", 7)
    return copy_run(bucket_finished, tmp_path / "run")


def command(name, run, *more):
    return main([name, *bucket_experiment(run), *SMALL, *more])


def stored(run, *splits):
    """Bucket -> images and captions of its shards, as they were encoded."""
    found = {}
    for name in SIZES:
        folders = [run / "prepared" / "shards" / f"cluster-{k}" / name / split for k in (0, 1) for split in splits]
        shards = open_shards(folders)
        rows = np.arange(len(shards))
        images = shards.take(rows, ("x_0",))["x_0"].numpy().transpose(0, 2, 3, 1)
        found[name] = images, shards.texts(rows, "caption")
    return found


@given(st.lists(st.integers(0, 20), min_size=1).filter(any), st.integers(1, 100))
def test_sections_are_the_buckets_of_evenly_spaced_images(counts, num):
    names = [f"{number}" for number in range(len(counts))]
    of_each = np.repeat(names, counts)
    found = sections(dict(zip(names, counts, strict=True)), num)
    every = [(name, row) for name, rows in found.items() for row in rows]
    assert every == [(of_each[row * len(of_each) // num], row) for row in range(num)]
    assert all(
        abs(len(found.get(name, ())) - count * num / sum(counts)) < 1 for name, count in zip(names, counts, strict=True)
    )


def test_each_bucket_is_scored_against_its_own_held_out_images(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert command("evaluate", run, "--out", str(out), f"evaluate.metrics=[{KID}, {FD}]") == 0
    shown = capsys.readouterr().out
    held_out = stored(run, "held-out")
    found = json.loads((out / "evaluation.json").read_text())
    nums = [len(images) for images, _ in held_out.values()]
    assert [one["num_reference"] for one in found["buckets"].values()] == nums
    made = {name: [] for name in SIZES}
    for path in sorted((out / "parts").iterdir()):
        images = np.load(path)["images"]
        (name,) = (name for name, size in SIZES.items() if size == images.shape[1:3])
        made[name].append(images)

    features = FEATURES.build("pixels", {}).encode
    made = {name: features(np.concatenate(images)) for name, images in made.items()}
    real = {name: features(images) for name, (images, _) in held_out.items()}
    for name, one in found["buckets"].items():
        assert one["num_generated"] == len(made[name])
        assert abs(len(made[name]) - 40 * len(real[name]) / sum(nums)) < 1
        assert_kid(one["scores"], made[name], real[name])

    assert_kid(found["scores"], *(np.concatenate([*sets.values()]) for sets in (made, real)))
    # Too few images for the metrics: three of one bucket, fewer than ten of each.
    lines = [line.split()[:3] for line in shown.splitlines() if "x" in line and "–" in line]
    assert lines == [["KID", "(pixels),", "4x16"], *(["FD", "(pooled-pixels),", name] for name in SIZES)]
    assert found["memorisation"]["num_held_out"] == sum(nums)


def assert_kid(scores, made, real):
    if len(real) < 4:
        assert not scores
        return

    (score,) = METRICS.build("kid", {"features": "pixels"}).scores(*map(torch.from_numpy, (made, real))).values()
    assert scores["KID (pixels)"]["value"] == pytest.approx(score.value, rel=1e-6)


class Recorder:
    """A metric that keeps what it is given."""

    captioned = True

    def __init__(self):
        self.reset()

    def to(self, _):
        return self

    def reset(self):
        self.given = []

    def update(self, images, captions=None, *, real):
        self.given.append((images.shape[1:3], captions, real))

    def compute(self):
        return torch.tensor(float(len(self.given)))


def test_no_batch_mixes_shapes_and_captions_are_those_of_the_bucket(run, monkeypatch):
    monkeypatch.setitem(METRICS._registered, "recorder", Recorder)
    settings = [*bucket_experiment(run)[2:], *SMALL, "evaluate.metrics=[{name: recorder}]"]
    made = evaluation.Evaluation(Run(load_experiment(TINY, settings)), None, None)
    every = made.scores()["recorder"]["value"]
    ((_, metric),) = made.metrics
    captions = {name: Counter() for name in SIZES}
    for size, texts, real in metric.given:
        if not real:
            captions["{}x{}".format(*size)].update(texts)

    # Of 40 images, each held-out caption describes two or three of its own bucket.
    for name, (_, texts) in stored(run, "held-out").items():
        assert captions[name].keys() == {*texts}

    assert every == sum(made.scores(bucket)["recorder"]["value"] for bucket in BUCKETS)
    assert {size for size, *_ in metric.given} == {SIZES["16x4"]}, "after a reset"


def test_files_of_any_shape_go_to_buckets_as_prepare_puts_them(run):
    found = FileImages(run / "images", BUCKETS)
    for bucket, (images, _) in zip(BUCKETS, stored(run, "train", "held-out").values(), strict=True):
        rows = image_sets.parts(found, bucket)
        assert max(map(len, rows)) <= 7
        files = np.concatenate([found.images(part) for part in rows])
        assert Counter(image.tobytes() for image in files) == Counter(image.tobytes() for image in images)

    assert found.sha256 != FileImages(run / "images", BUCKETS[:2]).sha256


def test_a_saved_ensemble_makes_as_many_of_each_bucket_as_its_reference_has(run, tmp_path):
    saved = tmp_path / "saved"
    assert main(["export", *bucket_experiment(run), "--to", "ensemble", "--out", str(saved)]) == 0
    write_shapes(tmp_path / "real", 20)
    given = [f"evaluate.reference={tmp_path / 'real'}", "sample.prompts=[red, blue]", f"evaluate.metrics=[{KID}]"]
    assert main(["evaluate", "-c", str(saved), "--out", str(tmp_path / "out"), *SMALL, *given]) == 0
    found = json.loads((tmp_path / "out" / "evaluation.json").read_text())["buckets"]
    nums = {name: (one["num_generated"], one["num_reference"]) for name, one in found.items()}
    assert nums == {"4x16": (8, 4), "8x8": (20, 10), "16x4": (12, 6)}


def test_a_diagnosis_has_each_bucket_and_all_together(run, capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "draw_charts", lambda *_: None)
    assert command("diagnose", run, "--num", "12", "--strategy", "top-1") == 0
    figures = json.loads((run / "diagnosis" / "diagnosis.json").read_text())
    manifest = Manifest.read(run)
    counts = [[cluster.held_out for cluster in clusters] for clusters in manifest.bucket_samples]
    assert figures["buckets"] == dict(zip(SIZES, counts, strict=True))
    by_bucket = np.array(figures["experts"]["in_cluster_by_bucket"])
    whole = (by_bucket * counts).sum(0) / np.sum(counts, 0)
    assert figures["experts"]["in_cluster"] == pytest.approx(whole, rel=1e-5)
    shown = capsys.readouterr().out
    assert all(f"{name}, own experts" in shown for name in SIZES)
    assert "accuracy by bucket: 4x16 0." in shown or "accuracy by bucket: 4x16 1." in shown


class Constant(torch.nn.Module):
    prediction = "velocity"

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x_t, t, condition):
        return torch.full_like(x_t, self.value)


class First(torch.nn.Module):
    """Takes the first cluster for images that are wide, otherwise the second."""

    def forward(self, x_t, t, condition):
        is_wide = x_t.shape[3] > x_t.shape[2]
        return torch.tensor([0.9, 0.1] if is_wide else [0.2, 0.8]).log().expand(len(x_t), -1)


def test_figures_of_two_shapes_by_hand():
    """Experts of velocity 0 and 1; images of 0 under noise n have the velocity n."""
    generator = torch.Generator().manual_seed(0)
    wide, tall = (
        Samples(torch.zeros(num, 1, *size), torch.randint(2, (num,), generator=generator), torch.arange(num), None)
        for num, size in ((40, (1, 4)), (30, (6, 2)))
    )
    made = Ensemble([Constant(0.0), Constant(1.0)], First(), [0.5, 0.5])
    both, *alone = (expert_figures(made, given, seed=0) for given in ([wide, tall], [wide], [tall]))
    for number, one in enumerate(alone):
        assert both["in_cluster_by_bucket"][number] == pytest.approx(one["in_cluster"])
        assert "in_cluster_by_bucket" not in one

    counts = np.stack([own.clusters.bincount(minlength=2).numpy() for own in (wide, tall)])
    losses = np.stack([one["loss"] for one in alone])  # [shape, expert, cluster]
    assert both["loss"] == pytest.approx((losses * counts[:, None]).sum(0) / counts.sum(0), rel=1e-5)
    # Variance and square of the mean are sums over all values: 160 wide ones and 360 tall ones.
    values = [(40 * 4, 0.1), (30 * 12, 0.8)]
    expected = sum(num * p * (1 - p) for num, p in values) / sum(num * p * p for num, p in values)
    assert both["disagreement"] == pytest.approx([expected] * 8)
    found = router_figures(made, [wide, tall], seed=0)["unconditional"]
    right = [float((wide.clusters == 0).double().mean()), float((tall.clusters == 1).double().mean())]
    assert found["accuracy_by_bucket"] == [pytest.approx(right)] * 8
    assert found["accuracy"] == pytest.approx([(40 * right[0] + 30 * right[1]) / 70] * 8)


def test_a_cluster_without_images_of_a_bucket_has_no_loss_there():
    experts = {"loss": [[0.5, 2.0], [2.0, 0.7]], "names": ["expert-0", "expert-1"], "in_cluster": [0.5, 0.7],
               "out_of_cluster": [2.0, 2.0], "in_cluster_by_bucket": [[0.0, 0.7], [0.5, 0.6]]}  # fmt: skip
    made = diagnosis_table({"experts": experts, "buckets": {"4x16": [0, 3], "8x8": [1, 3]}})
    cells = [[*map(str, column.cells)][2:] for column in made.columns]
    assert cells == [
        ["4x16, own experts", "8x8, own experts"],
        ["–", "0.5000"],
        ["0.7000", "0.6000"],
        ["0.7000", "0.5750"],
        ["", ""],
    ]
