"""Saved ensembles: what is saved loads with the same images, from a folder, a URL and diffusers."""

from __future__ import annotations

import json
import tempfile
import uuid
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
import torch
import yaml
from artifact_files import edit, refused
from diffusers import DiffusionPipeline
from PIL import Image
from saved_ensembles import images, load, saved
from tiny_runs import ROOT, settings

from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.parser import main
from ddm_lightning.core.files import sha256_file
from ddm_lightning.members.artifact import read_meta


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return saved(tmp_path)


def test_it_sets_up_torch_on_a_gpu(three: Path, torch_settings: None) -> None:
    ensemble = load(three)
    assert torch.get_float32_matmul_precision() == "highest"
    with suppress(AssertionError, RuntimeError):  # this torch may know no CUDA
        ensemble.to("cuda")
    assert torch.get_float32_matmul_precision() == "high"


def test_a_saved_ensemble_moves_and_keeps_its_images(three: Path, tmp_path: Path) -> None:
    before = images(load(three))
    load(three).save_pretrained(tmp_path / "copy", licence="MIT")
    three.rename(tmp_path / "gone")
    copy = load(tmp_path / "copy")
    assert images(copy) == before and copy.about.licence == "MIT"
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        *("README.md", "ensemble.json", "expert-0", "expert-1", "expert-2", "router")
    ]
    card = (tmp_path / "copy" / "README.md").read_text()
    for name in ("expert-0", "expert-1", "expert-2", "router"):
        assert read_meta(tmp_path / "copy" / name).model_sha256 in card
    for words in ("Some painters", "MIT", "ab" * 32, "| 0.3000 |", "velocity, cosine"):
        assert words in card
    front = yaml.safe_load(card.split("---")[1])  # what a model hub reads
    assert front["pipeline_tag"] == "text-to-image" and front["library_name"] == "ddm_lightning"


def test_a_url_is_downloaded_and_checked(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"memory://{uuid.uuid4()}"
    memory = fsspec.filesystem("memory")
    memory.put(str(three), url, recursive=True)
    assert images(DecentralizedEnsemble.from_pretrained(f"{url}/", "cpu")) == images(load(three))
    memory.rm(f"{url}/expert-1", recursive=True)
    assert len(DecentralizedEnsemble.from_pretrained(url, "cpu").manifest.experts) == 2
    assert f"note: {url}/ensemble.json: " in capsys.readouterr().err
    weights = f"{url}/expert-0/model.safetensors"
    memory.pipe_file(weights, memory.cat_file(weights)[:-8])
    refused(lambda: DecentralizedEnsemble.from_pretrained(url, "cpu"), f"{url}/expert-0/model.safetensors: not a whole")
    members = json.loads((three / "ensemble.json").read_text())["members"]
    edit(three / "ensemble.json", members=[{**members[0], "path": "../elsewhere"}])
    memory.put(str(three / "ensemble.json"), f"{url}/ensemble.json")
    refused(lambda: DecentralizedEnsemble.from_pretrained(url, "cpu"), "'../elsewhere' leaves its folder")
    assert not (tmp_path / "elsewhere").exists()
    refused(lambda: DecentralizedEnsemble.from_pretrained("memory://none", "cpu"), "memory://none: holds no ensemble")
    refused(lambda: DecentralizedEnsemble.from_pretrained("nosuch://a", "cpu"), "nosuch://a: cannot be read")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": -1}, "in about: key 'seed'"),
        ({"sample": {"strategie": "full"}}, "unknown key 'about.sample.strategie'"),
        ({"sample": {"num_steps": 0}}, "'about.sample.num_steps' = 0"),
        ({"code": "import os"}, "in about: unknown key 'code'"),
    ],
)
def test_bad_settings_in_a_manifest(three: Path, changes: dict, words: str) -> None:
    about = json.loads((three / "ensemble.json").read_text())["about"]
    edit(three / "ensemble.json", about={**about, **changes})
    refused(lambda: load(three), three / "ensemble.json", words)


def test_what_sampling_cannot_take_is_refused_in_one_line(three: Path) -> None:
    ensemble = load(three)
    refused(lambda: ensemble.sample(factors=[1, 0]), "factors = [1, 0]: give 3 numbers from 0 up")
    refused(lambda: ensemble.sample(factors=[-1, 1, 1]), "give 3 numbers from 0 up")
    refused(lambda: ensemble.sample(steps=2), "no setting 'steps'; known: strategy, ")
    refused(lambda: DecentralizedEnsemble.from_pretrained(three, "cpu", resident_experts=1), "give at least 2")


def test_names_of_other_classes_than_the_experts_know(three: Path) -> None:
    manifest = three / "ensemble.json"
    document = json.loads(manifest.read_text())
    for entry in document["members"]:
        member = three / entry["path"] / "member.json"
        edit(member, condition={"kind": "class", "size": 3})
        entry["member_json_sha256"] = sha256_file(member)
    edit(manifest, members=document["members"], about={**document["about"], "class_names": ["cat", "dog"]})
    refused(lambda: load(three), manifest, "2 class_names for 3 classes")


@pytest.mark.slow
def test_export_loads_in_diffusers_with_the_same_images(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    export = ["export", *settings(finished_run), "sample.num_steps=3", "--out", str(out)]
    assert main([*export, "--to", "diffusers", "--licence", "CC0"]) == 0
    assert "CC0" in (out / "README.md").read_text() and str(out) in capsys.readouterr().out
    pipeline = DiffusionPipeline.from_pretrained(out, custom_pipeline=str(out), trust_remote_code=True)
    generator = torch.Generator().manual_seed(3)
    got = pipeline(["red disc", "a cross"], num_images_per_prompt=2, generator=generator).images
    of_run = DecentralizedEnsemble.from_pretrained(finished_run)
    expected = of_run.sample(["red disc", "a cross"], num=2, seed=3, num_steps=3)
    assert [image.tobytes() for image in got] == [image.tobytes() for image in expected]
    more = pipeline.to("cpu")("red disc", num_inference_steps=2, strategy="bayes", num_images_per_prompt=1).images
    assert isinstance(more[0], Image.Image) and len(more) == 1
    pipeline.save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {path.name for path in out.iterdir()}
    assert main([*export, "--to", "ensemble"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.slow
def test_the_notebook_runs(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "sample.ipynb").read_text(encoding="utf-8"))
    defined: dict = {"display": lambda *_: None}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]).replace("runs/emoji_4x", str(three)), defined)
