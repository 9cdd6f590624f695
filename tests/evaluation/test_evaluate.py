"""``evaluate``: what it writes, what it finds again, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_runs import RANK_VARIABLES, ROOT, copy_run, settings

from ddm_lightning.cli.parser import main
from ddm_lightning.core.registry import FEATURES, METRICS
from ddm_lightning.ensemble import load
from ddm_lightning.evaluation import image_sets
from ddm_lightning.evaluation.image_sets import ShardImages
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, Manifest

PIXELS = "{name: kid, params: {features: pixels}}"
FD = "{name: fid, params: {features: pooled-pixels, num_groups: 2, min_images: 10}}"
SMALL = ("evaluate.num_images=20", f"evaluate.metrics=[{PIXELS}, {FD}]", "sample.num_steps=2")


@pytest.fixture
def run(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(image_sets, "PART_SIZE", 8)
    return copy_run(finished_run, tmp_path / "run")


def evaluate(run: Path, *more: str, small: tuple[str, ...] = SMALL) -> int:
    return main(["evaluate", *settings(run), *small, *more])


def result(folder: Path) -> dict:
    return json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_scores_are_those_of_the_images_on_disk(run: Path, tmp_path: Path) -> None:
    assert evaluate(run, "--out", str(tmp_path / "out"), "evaluate.image_format=png") == 0
    found = result(tmp_path / "out")
    images = np.concatenate([np.load(path)["images"] for path in sorted((tmp_path / "out" / "parts").iterdir())])
    files = sorted((tmp_path / "out" / "images").iterdir())
    assert np.array_equal(images, np.stack([np.asarray(Image.open(path)) for path in files])) and len(images) == 20
    held_out = decoded(run, HELD_OUT)
    metric = METRICS.build("kid", {"features": "pixels"})
    metric.update(images, real=False)
    metric.update(held_out, real=True)
    assert found["scores"]["KID (pixels)"]["value"] == pytest.approx(metric.compute().value, rel=1e-6)
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


def decoded(run: Path, side: str) -> np.ndarray:
    from ddm_lightning.encoders.images import Pixels

    images = ShardImages(run / "prepared" / "shards", Manifest.read(run), Pixels(), side)
    return np.concatenate([images.images(rows) for rows in image_sets.parts(images)])


def test_training_images_are_found_out_and_score_a_distance_of_zero(run: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "copied.npz", images=decoded(run, TRAIN)[:30])
    out = tmp_path / "out"
    assert evaluate(run, "--images", str(tmp_path / "copied.npz"), "--out", str(out), "evaluate.reference=train") == 0
    found = result(out)
    assert found["memorisation"]["share_nearer"] == 1 and found["memorisation"]["median_distance"] < 1e-5
    # A folder of the same images, as reference and as samples.
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, image in enumerate(decoded(run, TRAIN)[:30]):
        Image.fromarray(image).save(folder / f"{number:02d}.png")
    more = ["--images", str(folder), "--out", str(tmp_path / "other"), f"evaluate.reference={tmp_path / 'copied.npz'}"]
    assert evaluate(run, *more) == 0
    assert result(tmp_path / "other")["scores"]["FD (pooled-pixels)"]["value"] == pytest.approx(0, abs=1e-6)


def test_a_second_call_samples_only_what_is_missing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    sample = load.sample

    def counted(*arguments: object, **named: object) -> object:
        numbers.append(arguments[2])  # type: ignore[arg-type]
        return sample(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(load, "sample", counted)
    assert evaluate(run) == 0
    (folder,) = (path for path in (run / "evaluation").iterdir() if path.name != "features")
    first = result(folder)
    (folder / "parts" / "00000008.npz").unlink()
    assert evaluate(run) == 0
    assert numbers == [8, 8, 4, 8] and result(folder) == first
    monkeypatch.setattr(FEATURES.get("pixels"), "encode", None)  # other metrics on the same features compute none
    assert evaluate(run, "evaluate.metrics=[{name: precision-recall, params: {features: pixels}}]") == 0
    assert numbers == [8, 8, 4, 8] and "recall (pixels)" in result(folder)["scores"]


def test_results_of_other_settings_are_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", str(tmp_path / "out"))
    assert evaluate(run, *out) == 0
    before = sorted((tmp_path / "out").rglob("*"))
    capsys.readouterr()
    for more, said in {
        ("sample.num_steps=3",): "results of other settings: sample (was {'strategy'",
        ("evaluate.num_images=21",): "num_images (was 20)",
    }.items():
        assert evaluate(run, *out, *more) == 2
        assert said in refused(capsys)
    settings_file = tmp_path / "out" / "settings.json"
    settings_file.write_text(settings_file.read_text().replace('"commit": "', '"commit": "0'))
    assert evaluate(run, *out) == 2
    assert "commit (was '0" in refused(capsys)
    assert sorted((tmp_path / "out").rglob("*")) == before
    assert evaluate(run, "--out", str(tmp_path)) == 2
    assert "is not empty and holds no settings.json; give another folder" in refused(capsys)


def test_bad_input_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "large.npz", images=np.zeros((5, 9, 9, 3), np.uint8))
    np.savez(tmp_path / "floats.npz", images=np.zeros((5, 8, 8, 3)))
    (tmp_path / "mixed").mkdir()
    for number, side in enumerate((8, 9)):
        Image.new("RGB", (side, side)).save(tmp_path / "mixed" / f"{number}.png")
    (tmp_path / "none").mkdir()
    inception = "features: inception, features_params: {path: no.pt}"
    for setting, said in {
        "evaluate.metrics=[{name: fid}]": "metric 'fid' needs 2,000 images of each kind, not 20 samples, 21 real; use",
        f"evaluate.metrics=[{{name: kid, params: {{{inception}}}}}]": "no.pt: the weights of 'inception'",
        "evaluate.metrics=[{name: fib}]": "unknown metric 'fib'",
        "evaluate.metrics=[{name: kid, params: {features: dino}}]": "unknown feature network 'dino'",
        f"evaluate.reference={tmp_path}/large.npz": "its images and the generated ones have 9 × 9 and 8 × 8 pixels",
        f"evaluate.reference={tmp_path}/floats.npz": "holds float64 [5, 8, 8, 3], not uint8",
        f"evaluate.reference={tmp_path}/none": "none: holds no images (.png",
        f"evaluate.reference={tmp_path}/nowhere": "nowhere: is neither a folder nor an .npz file",
    }.items():
        assert evaluate(run, setting) == 2, setting
        error = refused(capsys)
        assert said in error, error
    assert not (run / "evaluation").exists()
    assert evaluate(run, f"evaluate.reference={tmp_path}/mixed", "evaluate.metrics=[{name: kid}]") == 2
    assert "metric 'kid' needs 4 images" in refused(capsys)


def test_a_run_without_an_ensemble_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "ensemble.json").unlink()
    shutil.rmtree(run / "members" / "expert-0" / "artifact")
    assert evaluate(run) == 2
    assert "does not exist yet, because these members are not finished: expert-0" in refused(capsys)


@pytest.mark.slow
def test_two_ranks_write_what_one_writes(run: Path, tmp_path: Path) -> None:
    assert evaluate(run, "--out", str(tmp_path / "one")) == 0
    shutil.rmtree(run / "evaluation")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    program = "import sys; from ddm_lightning.evaluation import image_sets; image_sets.PART_SIZE = 8; "
    program += "from ddm_lightning.cli.parser import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "evaluate", *settings(run), *SMALL, "--out", str(tmp_path / "two")]
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **clean,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[1] == "" and "KID (pixels)" in said[0]
    assert result(tmp_path / "one") == result(tmp_path / "two")
