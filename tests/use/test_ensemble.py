"""Saved ensembles: what is saved loads with the same images, from a folder, a URL and diffusers."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import nbclient
import nbformat
import numpy as np
import pytest
import torch
import yaml
from artifact_files import edit, refused
from diffusers import DiffusionPipeline
from hub import hub as hub
from PIL import Image
from saved_ensembles import images, load, saved
from tiny_runs import ROOT, copy_run, settings

from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.parser import main
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.ensemble.routing import Trace
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.members.artifact import read_meta
from ddm_lightning.use.export import export_diffusers


@pytest.fixture
def three(tmp_path: Path) -> Path:
    return saved(tmp_path)


def test_it_sets_up_torch_on_a_gpu(three: Path, torch_settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ensemble = load(three)
    assert torch.get_float32_matmul_precision() == "highest"
    monkeypatch.setattr("ddm_lightning.use.ensemble.usable_device", torch.device)
    with suppress(AssertionError, RuntimeError):  # this torch may know no CUDA
        ensemble.to("cuda")
    assert torch.get_float32_matmul_precision() == "high"


@contextlib.contextmanager
def defaults_of(kind: str) -> Iterator[None]:
    """What a Python caller may have set for computations of its own."""
    if isinstance(default := getattr(torch, kind, None), torch.dtype):
        torch.set_default_dtype(default)
    elif kind == "meta":
        torch.set_default_device("meta")
    contexts = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "inference": torch.inference_mode}
    try:
        with contexts.get(kind, contextlib.nullcontext)():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.filterwarnings("ignore:.*for .*copying from a non-meta parameter:UserWarning")
@pytest.mark.parametrize("kind", ["float64", "bfloat16", "meta", "autocast", "inference"])
@pytest.mark.parametrize("when", ["load", "sample"])
def test_defaults_of_the_caller_change_no_image(three: Path, kind: str, when: str) -> None:
    expected = images(load(three))
    state = torch.manual_seed(7).get_state()
    with defaults_of(kind if when == "load" else "none"):
        ensemble = load(three)
    with defaults_of(kind if when == "sample" else "none"):
        found = images(ensemble)
        if kind in ("float64", "bfloat16") and when == "sample":
            assert torch.get_default_dtype() == getattr(torch, kind), "the caller's default stays"
    assert found == expected
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers stay"


def test_one_factor_alone_is_refused_or_taken(three: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"factors = \[1\]: give 3 numbers from 0 up, one per cluster"):
        load(three).sample("prompt", factors=1)
    (tmp_path / "one").mkdir()
    single = load(saved(tmp_path / "one", counts=(5,)))
    assert images(single, factors=2) == images(single)


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
    for words in ("Some painters", "MIT", "ab" * 32, "| 0.3000 |", "velocity, cosine |"):
        assert words in card
    front = yaml.safe_load(card.split("---")[1])  # what a model hub reads
    assert front["pipeline_tag"] == "text-to-image" and front["library_name"] == "ddm_lightning"


def test_the_card_names_the_weights_that_members_started_from(tmp_path: Path) -> None:
    card = (saved(tmp_path, init_from="runs/seed", init_sha256="cd" * 32) / "README.md").read_text()
    assert card.count(f"| `runs/seed`, SHA-256 `{'cd' * 32}` |") == 3
    assert card.count("| random weights |") == 1, "the router"


def test_a_url_is_downloaded_and_checked(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"memory://me:secret@{uuid.uuid4()}"
    told = url.replace("secret", "***")
    memory = fsspec.filesystem("memory")
    memory.put(str(three), url, recursive=True)
    assert images(DecentralizedEnsemble.from_pretrained(f"{url}/", "cpu")) == images(load(three))
    memory.rm(f"{url}/expert-1", recursive=True)
    assert len(DecentralizedEnsemble.from_pretrained(url, "cpu").manifest.experts) == 2
    assert f"note: {told}/ensemble.json: " in capsys.readouterr().err
    weights = f"{url}/expert-0/model.safetensors"
    memory.pipe_file(weights, memory.cat_file(weights)[:-8])
    refused(
        lambda: DecentralizedEnsemble.from_pretrained(url, "cpu"), f"{told}/expert-0/model.safetensors: not a whole"
    )
    members = json.loads((three / "ensemble.json").read_text())["members"]
    edit(three / "ensemble.json", members=[{**members[0], "path": "../elsewhere"}])
    memory.put(str(three / "ensemble.json"), f"{url}/ensemble.json")
    refused(lambda: DecentralizedEnsemble.from_pretrained(url, "cpu"), "'../elsewhere' leaves its folder")
    assert not (tmp_path / "elsewhere").exists()
    refused(
        lambda: DecentralizedEnsemble.from_pretrained("memory://none", "cpu"),
        "memory://none/ensemble.json: the ensemble's",
    )
    refused(lambda: DecentralizedEnsemble.from_pretrained("nosuch://a", "cpu"), "nosuch://a cannot be read")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": -1}, "key 'about.seed' = -1: must be at least 0"),
        ({"sample": {"num_steps": 0}}, "'about.sample.num_steps' = 0"),
        ({"sample": {"strategy_params": {"top_k": "???"}}}, "'about.sample.strategy_params.top_k': must be text"),
        ({"code": "import os"}, "unknown key 'about.code'"),
    ],
)
def test_bad_settings_in_a_manifest(three: Path, changes: dict, words: str) -> None:
    about = json.loads((three / "ensemble.json").read_text())["about"]
    edit(three / "ensemble.json", about={**about, **changes})
    refused(lambda: load(three), three / "ensemble.json", words)


def test_what_sampling_cannot_take_is_refused_in_one_line(three: Path) -> None:
    ensemble = load(three)
    for nothing in (*({"prompts": nothing} for nothing in ([], (), [None], [1], 1, Path("a"), b"a")), {"classes": []}):
        refused(lambda nothing=nothing: ensemble.sample(**nothing), "give prompts (strings) or classes")
    refused(lambda: ensemble.sample(""), "a prompt is empty")
    refused(lambda: ensemble.sample(factors=[1, 0]), "factors = [1, 0]: give 3 numbers from 0 up")
    refused(lambda: ensemble.sample(factors=[-1, 1, 1]), "give 3 numbers from 0 up")
    refused(lambda: ensemble.sample(steps=2), "no setting 'steps'; known: strategy, ")
    refused(lambda: DecentralizedEnsemble.from_pretrained(three, "cpu", resident_experts=0), "must be at least 2")
    refused(lambda: DecentralizedEnsemble.from_pretrained(three, "cpu", resident_experts=1), "must be at least 2")


def test_numbers_of_numpy_are_numbers(three: Path) -> None:
    expected = images(load(three), num=2, seed=3, num_steps=2, guidance_scale=2.0)
    numbers = {"num": np.int64(2), "seed": np.int64(3), "num_steps": np.int32(2), "guidance_scale": np.float32(2)}
    assert images(load(three), **numbers) == expected
    assert images(load(three), num_per_prompt=2, seed=3, num_steps=2, guidance_scale=2.0) == expected


def test_repeated_prompts_give_other_images(three: Path) -> None:
    ensemble = load(three)
    trace = Trace()
    made = [image.tobytes() for image in ensemble.sample(["cat", "dog", "cat", "cat "], num=2, trace=trace)]
    of_cat = [image.tobytes() for image in ensemble.sample("cat", num=4)]
    assert made[:2] + made[4:6] == of_cat and len({*made}) == 8
    assert set(trace.weights) == {*[("cat", i) for i in range(4)], ("dog", 0), ("dog", 1), ("cat ", 0), ("cat ", 1)}


def test_a_device_that_torch_cannot_use_changes_nothing(three: Path) -> None:
    ensemble = load(three)
    before = images(ensemble)
    for place in ("cuda:99", "xpu", "no-such", torch.bfloat16):
        refused(lambda place=place: ensemble.to(place), f"device {place}: torch cannot use it (")
    refused(lambda: DecentralizedEnsemble.from_pretrained(three, "no-such"), "device no-such: torch cannot use it (")
    assert ensemble.device.type == "cpu" and images(ensemble) == before


def test_an_ensemble_that_cannot_be_loaded_elsewhere_stays_where_it_is(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensemble = load(three)
    before = images(ensemble)

    def to(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
        full.setattr(torch.nn.Module, "to", to)
        ensemble.to("meta")
    assert ensemble.device.type == "cpu" and images(ensemble) == before


def test_an_ensemble_tells_what_it_is(three: Path) -> None:
    members = "members=['expert-0', 'expert-1', 'expert-2', 'router']"
    expected = f"DecentralizedEnsemble('three', {members}, condition='text', x_shape=(3, 4, 4))"
    assert repr(load(three)) == expected


def test_a_name_that_is_no_folder_may_be_one_of_the_hub() -> None:
    refused(lambda: load("some/name"), "some/name: is not a folder here", "on the Hugging Face hub: hf://owner/name")


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # huggingface_hub leaves the file of a failed download open
def test_the_hub_takes_and_gives_an_ensemble(three: Path, hub: dict[str, dict[str, bytes]]) -> None:
    before = load(three)
    url = before.push_to_hub("owner/three", licence="MIT", token="hf_good")
    assert url.endswith("/owner/three") and b"weights: MIT" in hub["owner/three"]["README.md"]
    files = {path.relative_to(three).as_posix() for path in three.rglob("*") if path.is_file()}
    assert set(hub["owner/three"]) == files
    assert images(DecentralizedEnsemble.from_pretrained("hf://owner/three", "cpu")) == images(before)
    del hub["owner/three"]["expert-1/member.json"]
    assert len(DecentralizedEnsemble.from_pretrained("hf://owner/three", "cpu").manifest.experts) == 2
    refused(lambda: load("hf://owner/none"), "hf://owner/none/ensemble.json: the ensemble's manifest is missing")
    words = ("owner/other: cannot be uploaded (", "401", "hf auth")
    refused(lambda: before.push_to_hub("owner/other", token="hf_bad"), *words)
    refused(lambda: before.push_to_hub("a name", token="hf_good"), "a name: cannot be uploaded (Repo id must")


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("caption_encoder", "clip-text", "owner/name"),
        ("caption_encoder", "t5-text", "weights"),
        ("image_encoder", "diffusers-vae", "../weights"),
    ],
)
def test_an_encoder_that_a_stranger_names_reads_nothing(tmp_path: Path, kind: str, name: str, path: str) -> None:
    encoder = {"name": name, "params": {"path": path}}
    folder = saved(tmp_path, (100,), **{kind: encoder})
    line = refused(lambda: load(folder), folder / "expert-0" / "member.json", repr(name), path, "allow_paths=True")
    assert "--allow-paths" in line
    url = f"memory://{uuid.uuid4()}"
    fsspec.filesystem("memory").put(str(folder), url, recursive=True)
    refused(lambda: DecentralizedEnsemble.from_pretrained(url, "cpu"), repr(name))
    allowed = DecentralizedEnsemble.from_pretrained(folder, "cpu", allow_paths=True)
    refused(lambda: allowed.sample("cat", num=1), path)  # the encoder looks for it


def test_a_path_under_any_key_is_refused(tmp_path: Path) -> None:
    encoder = {"name": "hashed-words", "params": {"size": 5, "vocabulary": "owner/name"}}
    folder = saved(tmp_path, (100,), caption_encoder=encoder)
    refused(lambda: load(folder), "'hashed-words' would load", "owner/name")


@pytest.mark.slow
def test_the_encoders_of_ones_own_run_may_read_paths(finished_run: Path, tmp_path: Path) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    encoder = {"name": "clip-text", "params": {"path": str(tmp_path / "clip")}}
    document = json.loads((run / "ensemble.json").read_text())
    for entry in document["members"]:
        member = run / entry["path"] / "member.json"
        edit(member, caption_encoder=encoder)
        entry["member_json_sha256"] = sha256_file(member)
    edit(run / "ensemble.json", members=document["members"])
    record = run / "experiment.yaml"
    experiment = yaml.safe_load(record.read_text())
    experiment["prepare"]["caption_encoder"] = encoder
    record.write_text(yaml.safe_dump(experiment))
    assert len(load(run).manifest.experts) == 2
    url = f"memory://{uuid.uuid4()}"
    fsspec.filesystem("memory").put(str(run), url, recursive=True)
    refused(lambda: DecentralizedEnsemble.from_pretrained(url, "cpu"), "'clip-text' would load")


def test_names_of_other_classes_than_the_experts_know(three: Path) -> None:
    manifest = three / "ensemble.json"
    document = json.loads(manifest.read_text())
    for entry in document["members"]:
        member = three / entry["path"] / "member.json"
        edit(member, condition={"kind": "class", "size": 3})
        entry["member_json_sha256"] = sha256_file(member)
    edit(manifest, members=document["members"], about={**document["about"], "class_names": ["cat", "dog"]})
    refused(lambda: load(three), manifest, "2 class_names for 3 classes")


def test_a_number_is_no_name_of_a_class(tmp_path: Path) -> None:
    folder = saved(tmp_path, (100,), condition=ConditionSpec("class", 3), caption_encoder=None)
    about = json.loads((folder / "ensemble.json").read_text())["about"]
    names = ["1", "10", "2"]  # folders named by numbers, as the alphabet sorts them
    edit(folder / "ensemble.json", about={**about, "class_names": names})
    ensemble = load(folder)

    def made(one: str | int) -> bytes:
        return ensemble.sample(classes=one, num=1)[0].tobytes()

    assert made(2) == made("2") != made(1) == made("10") != made("1") == made(0)
    refused(lambda: ensemble.sample(classes=10), "class 10: no such class; give a number from 0 to 2")


@pytest.mark.slow
def test_export_loads_in_diffusers_with_the_same_images(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    export = ["export", *settings(finished_run), "sample.num_steps=3", "--out", str(out)]
    assert main([*export, "--to", "diffusers", "--licence", "CC0"]) == 0
    assert "CC0" in (out / "README.md").read_text() and str(out) in capsys.readouterr().out
    pipeline = DiffusionPipeline.from_pretrained(out, custom_pipeline=str(out), trust_remote_code=True)
    got = pipeline(["red disc", "a cross"], num_images_per_prompt=2, generator=seeded(3)).images
    of_run = DecentralizedEnsemble.from_pretrained(finished_run)
    seed = int(torch.randint(2**63 - 1, (), generator=seeded(3)))
    expected = of_run.sample(["red disc", "a cross"], num=2, seed=seed, num_steps=3)
    assert [image.tobytes() for image in got] == [image.tobytes() for image in expected]
    more = pipeline.to("cpu")("red disc", num_inference_steps=2, strategy="bayes").images
    assert isinstance(more[0], Image.Image) and len(more) == 1
    pipeline.save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {path.name for path in out.iterdir()}
    assert main([*export, "--to", "ensemble"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*export, "--to", "diffusers", "sample.member=expert-0"]) == 2
    assert "the network of expert-0 is 'dit', for which diffusers has no class" in capsys.readouterr().err


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exported(folder: Path) -> DiffusionPipeline:
    out = folder.parent / "exported"
    export_diffusers(load(folder).manifest, out)
    return DiffusionPipeline.from_pretrained(out, custom_pipeline=str(out), trust_remote_code=True, allow_paths=True)


@pytest.fixture
def pipeline(three: Path) -> DiffusionPipeline:
    return exported(three)


def test_the_pipeline_takes_what_those_of_diffusers_take(pipeline: DiffusionPipeline) -> None:
    (image,) = pipeline("cat", generator=seeded(1)).images  # one image, unless told otherwise
    pixels = np.asarray(image, np.float32) / 255
    (numbers,) = pipeline("cat", generator=seeded(1), output_type="np", return_dict=False)
    assert numbers.dtype == np.float32 and np.array_equal(numbers, pixels[None])
    tensor = pipeline("cat", generator=seeded(1), output_type="pt").images
    assert torch.equal(tensor, torch.from_numpy(pixels).permute(2, 0, 1)[None])
    same = pipeline("cat", generator=seeded(1), negative_prompt=[""]).images
    assert same[0].tobytes() == image.tobytes()


def test_the_pipeline_moves_to_a_device_and_a_dtype(pipeline: DiffusionPipeline, three: Path) -> None:
    def made(**settings: Any) -> np.ndarray:
        return pipeline("cat", num_images_per_prompt=4, seed=3, output_type="np", **settings).images

    whole, of_api = made(), load(three).sample("cat", num=4, seed=3)
    assert np.array_equal(whole, np.asarray(of_api, np.float32) / 255)
    reduced = np.asarray(load(three).sample("cat", num=4, seed=3, precision="bf16-mixed"), np.float32) / 255
    for where in ((torch.bfloat16,), ("cpu", torch.bfloat16)):
        assert np.array_equal(pipeline.to(*where) and made(), reduced)
    assert not np.array_equal(reduced, whole) and np.array_equal(made(precision="32-true"), whole)
    assert np.array_equal(pipeline.to(device="cpu", dtype=torch.float32) and made(), whole)
    for where, words in (("cuda:99", "device cuda:99: torch cannot use it"), (torch.int8, "dtype torch.int8: must be")):
        refused(lambda where=where: pipeline.to(where), words)
    assert np.array_equal(made(), whole)


def test_the_pipeline_moves_after_its_first_images_too(pipeline: DiffusionPipeline) -> None:
    before = pipeline("cat", generator=seeded(1)).images[0].tobytes()
    assert pipeline.to("meta").ensemble.device.type == "meta"
    assert {part.device.type for expert in pipeline.ensemble.field.experts for part in expert.parameters()} == {"meta"}
    assert pipeline.to("cpu")("cat", generator=seeded(1)).images[0].tobytes() == before


def test_the_pipeline_makes_as_many_images_as_it_has_prompts(pipeline: DiffusionPipeline) -> None:
    for generator in (None, seeded(1), [seeded(i) for i in range(4)], [seeded(1)] * 4):
        made = pipeline(np.array(["cat"] * 4), generator=generator).images
        assert len({image.tobytes() for image in made}) == 4, generator


def test_generators_of_the_pipeline(pipeline: DiffusionPipeline) -> None:
    def made(*prompts: str, **settings: Any) -> list[bytes]:
        return [image.tobytes() for image in pipeline(prompts, **settings).images]

    moving = seeded(1)
    first, second = made("cat", generator=moving), made("cat", generator=moving)
    assert first == made("cat", generator=seeded(1)) != second
    assert made("cat") != made("cat")  # torch's own generator
    torch.manual_seed(1)
    assert made("cat") == first
    each = made("cat", "dog", num_images_per_prompt=2, generator=[seeded(seed) for seed in (1, 2, 3, 1)])
    assert each[:1] == first and each[1:2] == made("cat", generator=seeded(2))
    assert each[3:] == made("dog", generator=seeded(1)) and len(set(each)) == 4


@pytest.mark.parametrize(("kind", "size", "more"), [("none", 0, {}), ("class", 3, {"class_labels": 2})])
def test_the_pipeline_of_ensembles_without_prompts(tmp_path: Path, kind: str, size: int, more: dict[str, int]) -> None:
    pipeline = exported(saved(tmp_path, (100,), condition=ConditionSpec(kind, size), caption_encoder=None))
    one, other = (pipeline(**more, generator=seeded(seed)).images[0].tobytes() for seed in (1, 2))
    both = pipeline(**more, num_images_per_prompt=2, generator=[seeded(1), seeded(2)]).images
    assert [image.tobytes() for image in both] == [one, other] and one != other
    four = {} if kind == "none" else {"class_labels": [2, "2", 2, 2]}
    repeated = pipeline(**four, num_images_per_prompt=1 if four else 4, generator=seeded(1)).images
    assert repeated[0].tobytes() == one and len({image.tobytes() for image in repeated}) == 4


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"negative_prompt": "dog"}, "negative_prompt: is not supported"),
        ({"negative_prompt": ["", "dog"]}, "negative_prompt: is not supported"),
        ({"output_type": "latent"}, "output_type = 'latent': must be pil, np or pt"),
        ({"generator": [torch.Generator()] * 2}, "generator: 2 for 1 images; give one, or one per image"),
        ({"class_labels": 1}, "prompt and class_labels: give one of them"),
        ({"height": 512}, "no setting 'height'"),
    ],
)
def test_what_the_pipeline_refuses(pipeline: DiffusionPipeline, settings: dict[str, Any], words: str) -> None:
    refused(lambda: pipeline("cat", **settings), words)


@pytest.mark.slow
def test_the_snippet_for_diffusers_runs_in_a_fresh_process(three: Path, tmp_path: Path) -> None:
    """Which has not yet imported torchvision; the one that pip installs beside a CPU torch may not fit it."""
    export_diffusers(load(three).manifest, tmp_path / "emoji")
    text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"\n\n((?:    .*\n|\n)+?)\n(?=You call it)", text)
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(snippet)}\nprint(image.size)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "(4, 4)\n", done.stderr
    assert "XFORMERS" not in done.stderr


@pytest.mark.slow
def test_sampling_imports_neither_a_trainer_nor_a_data_loader(three: Path) -> None:
    code = f"""
        import sys
        from ddm_lightning import DecentralizedEnsemble
        DecentralizedEnsemble.from_pretrained({str(three)!r}, "cpu").sample("cat")
        print(sorted({{"lightning", "pytorch_lightning", "streaming"}} & sys.modules.keys()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.long
def test_the_notebook_runs_as_documented(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own that works in ``examples``, which is where ``jupyter notebook`` starts it."""
    notebook = nbformat.read(ROOT / "examples" / "sample.ipynb", as_version=4)
    assert all(cell.outputs == [] for cell in notebook.cells if cell.cell_type == "code")
    (tmp_path / "examples").mkdir()
    shutil.copytree(three, tmp_path / "runs" / "emoji_4x")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    cells = nbclient.execute(notebook, cwd=tmp_path / "examples").cells

    shown = [output for cell in cells for output in cell.get("outputs", []) if output.output_type == "display_data"]
    assert len(shown) == 4 and all("image/png" in output.data for output in shown)
    assert (tmp_path / "examples" / "without_expert_1" / "README.md").exists()


def test_steps_are_shifted_as_in_the_experts_training(tmp_path: Path) -> None:
    """By 3, so that the middle of two steps is at 3 · 0.5 / (1 + 2 · 0.5)."""
    trace = Trace()
    load(saved(tmp_path, timestep_shift=3.0)).sample("apple", strategy="full", num=1, num_steps=2, trace=trace)
    assert trace.times.tolist() == [1, 0.75, 0]


def test_params_stay_with_their_solver_and_strategy(three: Path) -> None:
    own = {"solver": "dormand-prince", "solver_params": {"rtol": 0.1}, "strategy": "top-k"}
    ensemble = load(three).with_settings(**own, strategy_params={"top_k": 1})
    for arguments, solver, strategy in (
        ({"seed": 1}, {"rtol": 0.1}, {"top_k": 1}),
        ({"solver": "dormand-prince", "strategy": "top-k"}, {"rtol": 0.1}, {"top_k": 1}),
        ({"solver": "euler"}, {}, {"top_k": 1}),
        ({"strategy": "full"}, {"rtol": 0.1}, {}),
        ({"strategy": "bayes"}, {}, {}),  # which has a solver of its own
    ):
        found = ensemble.with_settings(**arguments).about.sample
        assert (found.solver_params, found.strategy_params) == (solver, strategy), arguments


def test_an_ensemble_that_has_lost_an_expert_is_saved_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path)
    shutil.rmtree(folder / "expert-1")
    load(folder).save_pretrained(tmp_path / "again")
    capsys.readouterr()
    again = load(tmp_path / "again")
    assert capsys.readouterr().err == "", "nothing is missing there"
    assert again.manifest.shares == pytest.approx({"expert-0": 2 / 7, "expert-2": 5 / 7})
    assert images(again) == images(load(folder))
