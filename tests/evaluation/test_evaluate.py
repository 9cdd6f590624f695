"""``evaluate``: what it writes, what it finds again, and what it refuses."""

import hashlib
import json
import re
import shutil
import socket
import struct
import time
import zlib

import numpy as np
import pytest
import torch
from forked import Forked
from PIL import Image
from tiny_runs import TINY, copy_run, settings

from ddm_lightning import api
from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.registry import FEATURES, METRICS
from ddm_lightning.evaluation import evaluate as evaluation
from ddm_lightning.evaluation import image_sets
from ddm_lightning.evaluation.image_sets import FileImages, Generated, ShardImages
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, Manifest
from ddm_lightning.use import loaded

PIXELS = "{name: kid, params: {features: pixels}}"
FD = "{name: fid, params: {features: pooled-pixels, num_groups: 2, min_images: 10}}"
SMALL = ("evaluate.num_images=20", f"evaluate.metrics=[{PIXELS}, {FD}]", "sample.num_steps=2")


@pytest.fixture
def run(finished_run, tmp_path, monkeypatch):
    monkeypatch.setattr(image_sets, "PART_SIZE", 8)
    return copy_run(finished_run, tmp_path / "run")


def evaluate(run, *more, small=SMALL):
    return main(["evaluate", *settings(run), *small, *more])


def result(folder):
    return json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))


def refused(capsys):
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_scores_are_those_of_the_images_on_disk(run, tmp_path):
    assert evaluate(run, "--out", str(tmp_path / "out"), "evaluate.image_format=png") == 0
    found = result(tmp_path / "out")
    images = np.concatenate([np.load(path)["images"] for path in sorted((tmp_path / "out" / "parts").iterdir())])
    files = sorted((tmp_path / "out" / "images").iterdir())
    assert np.array_equal(images, np.stack([np.asarray(Image.open(path)) for path in files])) and len(images) == 20
    held_out = decoded(run, HELD_OUT)
    (score,) = kid({"features": "pixels"}, images, held_out)
    assert found["scores"]["KID (pixels)"]["value"] == pytest.approx(score.value, rel=1e-6)
    assert found["reference"]["num"] == len(held_out)
    # The check for memorised samples, by brute force.
    features = {name: FEATURES.build("pixels", {}).encode(rows) for name, rows in
                (("samples", images), ("held_out", held_out), ("train", decoded(run, TRAIN)))}  # fmt: skip
    near = {name: np.linalg.norm(rows[:, None] - features["train"], axis=2).min(1) for name, rows in features.items()}
    expected = (near["samples"] < np.quantile(near["held_out"], 0.05)).mean()
    assert found["memorisation"]["share_nearer"] == pytest.approx(expected)
    assert found["memorisation"]["median_distance_of_held_out"] == pytest.approx(np.median(near["held_out"]), rel=0.05)
    with Image.open(tmp_path / "out" / "neighbours.png") as grid:
        assert grid.width > 100


def test_the_oracle_takes_the_cluster_of_the_image_whose_caption_it_gets(run, tmp_path):
    """Each image is that of the expert of its held-out image's cluster, sampled alone; a member alone makes all."""
    found = {}
    params = "sample.strategy_params={cluster: %d}"
    for name, own in {"own": (), 0: (params % 0,), 1: (params % 1,), "alone": ("sample.member=expert-1",)}.items():
        images = generated(run, "sample.strategy=oracle", *own)
        images.folder = tmp_path / str(name)
        found[name] = np.concatenate([images.images(rows) for rows in image_sets.parts(images)])

    given = images.given(range(20), "cluster")
    assert sorted({*given}) == [0, 1]
    assert np.array_equal(found["own"], np.stack([found[k][row] for row, k in enumerate(given)]))
    assert not np.array_equal(found[0], found[1])
    assert np.array_equal(found["alone"], found[1])


def generated(run, *more, manifest=True):
    settings = [f"run_dir={run}", *SMALL, *more]
    return Generated(Run(load_experiment(TINY, settings)), Manifest.read(run) if manifest else None)


def test_without_shards_prompts_are_repeated_in_turn(run):
    images = generated(run, "sample.prompts=[a, b, c]", manifest=False)
    assert images.given(range(7), "caption") == ["a", "b", "c", "a", "b", "c", "a"]
    assert images.given(range(4, 6), "caption") == ["b", "c"]


def test_an_image_is_the_same_in_parts_of_any_size(run, tmp_path, monkeypatch):
    found = []
    for size in (8, 5):
        monkeypatch.setattr(image_sets, "PART_SIZE", size)
        images = generated(run)
        images.folder = tmp_path / str(size)
        found.append(np.concatenate([images.images(rows) for rows in image_sets.parts(images)]).astype(int))

    assert np.abs(found[0] - found[1]).max() <= 1
    assert len(np.unique(found[0], axis=0)) == 20


def test_conditions_are_those_of_all_held_out_images_in_an_order_of_the_seed(run):
    first, second = (generated(run, f"seed={seed}") for seed in (0, 1))
    order = first.given(range(21), "sample_id")
    held_out = ShardImages(run / "prepared" / "shards", Manifest.read(run), HELD_OUT)
    assert sorted(order) == sorted(held_out.column(range(21), "sample_id")) != order
    assert first.given(range(15, 42), "sample_id") == order[15:] + order
    other = second.given(range(21), "sample_id")
    assert sorted(other) == sorted(order) and other != order


@pytest.mark.parametrize("member", [None, "expert-1"])
def test_results_are_kept_by_the_weights_and_named_after_what_is_sampled(run, member):
    file = run / "ensemble.json" if member is None else run / "members" / member / "artifact" / "member.json"
    more = () if member is None else (f"sample.member={member}",)
    made = evaluation.Evaluation(Run(load_experiment(TINY, [f"run_dir={run}", *SMALL, *more])), None, None)
    assert made.origin["weights_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert made.folder.name.startswith(f"{member or 'top-1'}-")


class Captioned:
    """A metric that keeps what it is given."""

    captioned = True

    def __init__(self):
        self.given = []

    def to(self, device):
        return self

    def update(self, images, captions=None, *, real):
        self.given.append((len(images), captions, real))

    def compute(self):
        return torch.tensor(float(len(self.given)))


def test_a_metric_gets_every_part_with_its_captions_and_is_told_which_are_real(run, monkeypatch):
    monkeypatch.setitem(METRICS._registered, "captioned", Captioned)
    experiment = load_experiment(TINY, [f"run_dir={run}", *SMALL, "evaluate.metrics=[{name: captioned}]"])
    made = evaluation.Evaluation(Run(experiment), None, None)
    assert made.scores()["captioned"]["value"] == 6
    ((_, metric),) = made.metrics
    captions = generated(run).given(range(20), "caption")
    assert [given for given in metric.given if not given[2]] == [
        (8, captions[:8], False),
        (8, captions[8:16], False),
        (4, captions[16:], False),
    ]
    assert [given for given in metric.given if given[2]] == [(8, None, True), (8, None, True), (5, None, True)]


def kid(params, *images):
    metric = METRICS.build("kid", params)
    return metric.scores(*(torch.from_numpy(metric.network.encode(rows)) for rows in images)).values()


def decoded(run, side):
    images = ShardImages(run / "prepared" / "shards", Manifest.read(run), side)
    return np.concatenate([images.images(rows) for rows in image_sets.parts(images)])


def test_training_images_are_found_out_and_score_a_distance_of_zero(run, tmp_path, monkeypatch):
    shown = []
    draw = evaluation.labelled_grid
    monkeypatch.setattr(
        evaluation, "labelled_grid", lambda rows, *more, **named: shown.extend(rows) or draw(rows, *more, **named)
    )
    copied = decoded(run, TRAIN)[:30]
    np.savez(tmp_path / "copied.npz", first=np.zeros(3), images=copied)
    out = tmp_path / "out"
    assert evaluate(run, "--images", str(tmp_path / "copied.npz"), "--out", str(out), "evaluate.reference=train") == 0
    found = result(out)
    assert found["memorisation"]["share_nearer"] == 1 and found["memorisation"]["median_distance"] < 1e-5
    for label, (sample, nearest, *_) in shown:
        own = copied[int(label.removeprefix("sample ").partition(":")[0])]
        assert np.array_equal(sample, own) and np.array_equal(nearest, own)

    # A folder of the same images, as reference and as samples.
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, image in enumerate(copied):
        Image.fromarray(image).save(folder / f"{number:02d}.png")

    more = ["--images", str(folder), "--out", str(tmp_path / "other"), f"evaluate.reference={tmp_path / 'copied.npz'}"]
    assert evaluate(run, *more) == 0
    assert result(tmp_path / "other")["scores"]["FD (pooled-pixels)"]["value"] == pytest.approx(0, abs=1e-6)


def test_features_of_other_parameters_are_computed_anew(run, tmp_path):
    """Both networks are called pooled-pixels, and read the same images; the second score names its params."""
    np.savez(tmp_path / "images.npz", images=decoded(run, TRAIN)[:30])
    every = [{"features": "pooled-pixels", "features_params": {"grid": grid}} for grid in (2, 4)]
    metrics = json.dumps([{"name": "kid", "params": params} for params in every])
    out = tmp_path / "out"
    shown = ["--images", str(tmp_path / "images.npz"), "--out", str(out), f"evaluate.metrics={metrics}"]
    assert evaluate(run, *shown) == 0
    found = result(out)["scores"]
    assert list(found) == ["KID (pooled-pixels)", f"KID (pooled-pixels) {json.dumps(every[1])}"]
    for params, score in zip(every, found.values(), strict=True):
        (expected,) = kid(params, decoded(run, TRAIN)[:30], decoded(run, HELD_OUT))
        assert score["value"] == pytest.approx(expected.value, rel=1e-6)


def test_a_second_call_samples_only_what_is_missing(run, monkeypatch):
    numbers = []
    sample = loaded.sample

    def counted(*arguments, **named):
        numbers.append(arguments[2])
        return sample(*arguments, **named)

    monkeypatch.setattr(loaded, "sample", counted)
    assert evaluate(run) == 0
    (folder,) = (path for path in (run / "evaluation").iterdir() if path.name != "features")
    first = result(folder)
    (folder / "parts" / "00000008.npz").unlink()
    assert evaluate(run) == 0
    assert numbers == [8, 8, 4, 8] and result(folder) == first
    monkeypatch.setattr(FEATURES.get("pixels"), "encode", None)  # other metrics on the same features compute none
    assert evaluate(run, "evaluate.metrics=[{name: precision-recall, params: {features: pixels}}]") == 0
    assert numbers == [8, 8, 4, 8] and result(folder) == first
    (second,) = folder.glob("evaluation-*.json")
    assert "recall (pixels)" in json.loads(second.read_text())["scores"]
    assert evaluate(run, "evaluate.reference=train") == 0  # nor does another reference replace them
    assert len([*folder.glob("evaluation-*.json")]) == 2 and result(folder) == first


def test_progress_and_time_left_show_before_the_first_part_is_done(run, monkeypatch, capsys):
    """All images are one part; a line under the strategy's name says how many are made."""
    monkeypatch.setattr(image_sets, "PART_SIZE", 256)
    monkeypatch.setattr("ddm_lightning.core.formatting.LINE_SECONDS", 0.01)
    sample = loaded.sample

    def slow(*arguments, progress, **named):
        return sample(*arguments, progress=lambda done: (progress(done), time.sleep(0.1)), **named)

    monkeypatch.setattr(loaded, "sample", slow)
    assert evaluate(run, "sample.strategy=full", "sample.num_steps=4") == 0
    lines = capsys.readouterr().err
    assert re.search(r"^full: (5|10|15) of 20, \S+ m?s left$", lines, re.MULTILINE)
    assert re.search(r"^full: 20 of 20$", lines, re.MULTILINE)


def test_results_of_other_settings_are_refused(run, tmp_path, capsys):
    out = ("--out", str(tmp_path / "out"))
    assert evaluate(run, *out) == 0
    before = sorted((tmp_path / "out").rglob("*"))
    capsys.readouterr()
    for more, said in {
        "sample.num_steps=3": "results of other settings: sample.num_steps (was 2); give",
        "evaluate.num_images=21": "num_images (was 20)",
        "sample.precision=bf16-mixed": "sample.precision (was '32-true')",  # auto, on a CPU
    }.items():
        assert evaluate(run, *out, more) == 2
        assert said in refused(capsys)

    file = tmp_path / "out" / "settings.json"
    file.write_text(file.read_text().replace('"commit": "', '"commit": "0'))
    assert evaluate(run, *out) == 2
    assert "commit (was '0" in refused(capsys)
    assert sorted((tmp_path / "out").rglob("*")) == before

    assert evaluate(run, "--out", str(tmp_path)) == 2
    assert "is not empty and holds no settings.json; give another folder" in refused(capsys)


@pytest.fixture
def files(tmp_path):
    """Files that cannot be compared."""
    large = tmp_path / "large.npz"
    np.savez(large, images=np.zeros((5, 9, 9, 3), np.uint8))
    np.savez(tmp_path / "floats.npz", images=np.zeros((5, 8, 8, 3)))
    (tmp_path / "none").mkdir()
    whole = large.read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:-30])
    (tmp_path / "empty.npz").write_bytes(b"")
    (tmp_path / "flipped.npz").write_bytes(whole.replace(b"\0" * 9, b"\1" * 9))
    return tmp_path


INCEPTION = "features: inception, features_params: {path: no.pt}"
NO_FILE = "is neither a folder nor an .npz file"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("metrics=[{name: fid}]", "metric 'fid' needs 2,000 images of each kind, not 20 samples, 21 real; use"),
        (f"metrics=[{{name: kid, params: {{{INCEPTION}}}}}]", "no.pt: the weights of 'inception'"),
        ("metrics=[{name: kid, params: {features: inception}}]", "are missing; download them from https://"),
        ("metrics=[{name: fib}]", "unknown metric 'fib'"),
        ("metrics=[{name: kid, params: {features: dino}}]", "unknown feature network 'dino'"),
        ("reference=FILES/large.npz", "its images have (9, 9) pixels, the generated ones (8, 8)"),
        ("reference=FILES/floats.npz", "holds float64 [5, 8, 8, 3], not uint8"),
        ("reference=FILES/none", "none: holds no images; give"),
        ("reference=FILES/nowhere", f"nowhere: {NO_FILE}"),
        ("reference=FILES/cut.npz", f"cut.npz: {NO_FILE}"),
        ("reference=FILES/empty.npz", f"empty.npz: {NO_FILE}"),
        ("reference=FILES/flipped.npz", f"flipped.npz: {NO_FILE}"),
    ],
)
def test_bad_input_is_one_line(run, files, capsys, setting, words):
    assert evaluate(run, f"evaluate.{setting}".replace("FILES", str(files))) == 2
    error = refused(capsys)
    assert words in error, error
    assert not (run / "evaluation").exists()


def test_a_broken_image_is_named(run, tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(5):
        Image.fromarray(np.full((8, 8, 3), 50 * number, np.uint8)).save(folder / f"{number}.png")

    whole = (folder / "3.png").read_bytes()
    huge = whole[:16] + struct.pack(">II", 60_000, 60_000) + whole[24:29]
    huge += struct.pack(">I", zlib.crc32(huge[12:])) + whole[33:]
    for content, cause in ((whole[:45], "damaged image"), (huge, "too many pixels"), (b"<html>", "no image")):
        (folder / "3.png").write_bytes(content)
        assert evaluate(run, "--images", str(folder), f"evaluate.metrics=[{PIXELS}]") == 2
        assert f"{folder / '3.png'}: {cause} (" in refused(capsys)

    (folder / "3.png").unlink()
    (folder / "3.png").symlink_to(tmp_path / "gone")
    assert evaluate(run, "--images", str(folder), f"evaluate.metrics=[{PIXELS}]") == 2
    assert f"{folder / '3.png'}: cannot be read" in refused(capsys)


def test_a_folder_of_images_is_read_as_prepare_reads_it(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    image = Image.fromarray(pixels)
    grey = pixels[..., :1].repeat(3, 2)
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "deep").mkdir()
    image.rotate(90).save(tmp_path / "deep" / "a.png", exif=exif)
    transparent = image.convert("RGBA")
    transparent.putalpha(0)
    transparent.save(tmp_path / "b.webp", lossless=True)
    Image.fromarray(grey[..., 0].astype(np.uint16) * 257).save(tmp_path / "c.TIFF")
    image.quantize(256).save(tmp_path / "d.png")
    (tmp_path / "e.gif").write_bytes((tmp_path / "d.png").read_bytes())
    for hidden in (".f.png", "__MACOSX/g.png", ".cache/h.png", "notes.txt", "scores.json"):
        (tmp_path / hidden).parent.mkdir(exist_ok=True)
        (tmp_path / hidden).write_bytes(b"no image")

    images = FileImages(tmp_path)
    expected = [np.full_like(pixels, 255), grey, np.asarray(image.quantize(256).convert("RGB"))]
    expected = [*expected, expected[-1], pixels]
    assert images.num == 5 and np.array_equal(images.images(range(5)), np.stack(expected))
    # Features that another decoder has seen are not used again.
    before = images.sha256
    (tmp_path / "decode.txt").write_text("another decoder")
    monkeypatch.setattr(image_sets.decode, "__file__", str(tmp_path / "decode.txt"))
    assert FileImages(tmp_path).sha256 != before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_ranks_write_what_one_writes(run, tmp_path, monkeypatch):
    pulled = tmp_path / "pulled"
    monkeypatch.setattr(api, "pull_ensemble", lambda *_: pulled.open("x").close())  # by one rank alone
    assert evaluate(run, "--out", str(tmp_path / "one")) == 0
    pulled.unlink()
    shutil.rmtree(run / "evaluation")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}

    def work():
        raise SystemExit(evaluate(run, "--out", str(tmp_path / "two")))

    ranks = [Forked(work, tmp_path / rank, RANK=rank, LOCAL_RANK=rank, **common) for rank in "01"]
    (first, said, _), (second, nothing, _) = (rank.finish() for rank in ranks)
    assert (first, second, nothing) == (0, 0, "") and "KID (pixels)" in said
    assert result(tmp_path / "one") == result(tmp_path / "two")
