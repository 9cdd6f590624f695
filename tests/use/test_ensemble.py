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
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

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
from saved_ensembles import images, load, saved
from saved_ensembles import kept as kept
from saved_ensembles import three as three
from tiny_runs import ROOT, copy_run, settings

from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.parser import main
from ddm_lightning.core.files import sha256_file
from ddm_lightning.ensemble.routing import Trace
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.meta import read_meta
from ddm_lightning.use.export import export_diffusers
from ddm_lightning.use.settings import load_settings


@pytest.fixture(scope="module")
def ensemble(kept):
    return load(kept)


def at_url(folder):
    url = f"memory://{uuid.uuid4()}"
    fsspec.filesystem("memory").put(str(folder), url, recursive=True)
    return url


def test_it_sets_up_torch_on_a_gpu(kept, monkeypatch):
    ensemble = load(kept)
    assert torch.get_float32_matmul_precision() == "highest"

    monkeypatch.setattr("ddm_lightning.use.call.usable_device", torch.device)
    with suppress(AssertionError, RuntimeError):  # this torch may know no CUDA
        ensemble.to("cuda")

    assert torch.get_float32_matmul_precision() == "high"


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype, "the caller's default stays"
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
}
"""What a Python caller may have set for computations of its own."""


@pytest.mark.filterwarnings("ignore:.*for .*copying from a non-meta parameter:UserWarning")
@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_of_the_caller_change_no_image(kept, ensemble, kind):
    expected = images(ensemble)
    state = torch.manual_seed(7).get_state()

    with DEFAULTS[kind]():
        loaded = load(kept)
        found = images(loaded)

    assert found == expected == images(loaded)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers stay"


def test_a_saved_ensemble_moves_and_keeps_its_images(three, ensemble, tmp_path):
    load(three).save_pretrained(tmp_path / "copy", licence="MIT")
    three.rename(tmp_path / "gone")
    copy = load(tmp_path / "copy")

    assert images(copy) == images(ensemble) and copy.about.licence == "MIT"
    members = ["expert-0", "expert-1", "expert-2", "router"]
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["README.md", "ensemble.json", *members]
    card = (tmp_path / "copy" / "README.md").read_text()
    hashes = [read_meta(tmp_path / "copy" / name).model_sha256 for name in members]
    for words in (*hashes, "Some painters", "MIT", "ab" * 32, "| 0.3000 |", "velocity, cosine |"):
        assert words in card

    front = yaml.safe_load(card.split("---")[1])  # what a model hub reads
    assert front["pipeline_tag"] == "text-to-image" and front["library_name"] == "ddm_lightning"


def test_the_card_names_the_weights_that_members_started_from(tmp_path):
    card = (saved(tmp_path, init_from="runs/seed", init_sha256="cd" * 32) / "README.md").read_text()
    assert card.count(f"| `runs/seed`, SHA-256 `{'cd' * 32}` |") == 3
    assert card.count("| random weights |") == 1, "the router"


def test_a_url_is_downloaded_and_checked(
    three,
    ensemble,
    tmp_path,
    monkeypatch,
    capsys,
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"memory://me:secret@{uuid.uuid4()}"
    told = url.replace("secret", "***")
    memory = fsspec.filesystem("memory")
    memory.put(str(three), url, recursive=True)

    def opened(url=url):
        return DecentralizedEnsemble.from_pretrained(url, "cpu")

    assert images(opened(f"{url}/")) == images(ensemble)

    memory.rm(f"{url}/expert-1", recursive=True)
    assert len(opened().manifest.experts) == 2
    assert f"note: {told}/ensemble.json: " in capsys.readouterr().err

    weights = f"{url}/expert-0/model.safetensors"
    memory.pipe_file(weights, memory.cat_file(weights)[:-8])
    refused(opened, f"{told}/expert-0/model.safetensors: not a whole")

    members = json.loads((three / "ensemble.json").read_text())["members"]
    edit(three / "ensemble.json", members=[{**members[0], "path": "../elsewhere"}])
    memory.put(str(three / "ensemble.json"), f"{url}/ensemble.json")
    refused(opened, "'../elsewhere' leaves its folder")
    assert not (tmp_path / "elsewhere").exists()

    refused(lambda: opened("memory://none"), "memory://none/ensemble.json: the ensemble's")
    refused(lambda: opened("nosuch://a"), "nosuch://a cannot be read")
    refused(lambda: opened(str(tmp_path)), tmp_path / "ensemble.json", "is missing")
    refused(lambda: opened("some/name"), "some/name: is not a folder here", "on the Hugging Face hub: hf://owner/name")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": -1}, "key 'about.seed' = -1: must be at least 0"),
        ({"sample": {"num_steps": 0}}, "'about.sample.num_steps' = 0"),
        ({"sample": {"strategy_params": {"top_k": "???"}}}, "'about.sample.strategy_params.top_k': must be text"),
        ({"code": "import os"}, "unknown key 'about.code'"),
    ],
)
def test_bad_settings_in_a_manifest(three, changes, words):
    about = json.loads((three / "ensemble.json").read_text())["about"]
    edit(three / "ensemble.json", about={**about, **changes})
    refused(lambda: load(three), three / "ensemble.json", words)


NO_PROMPTS = "give prompts (strings) or classes"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *(({"prompts": nothing}, NO_PROMPTS) for nothing in ([], (), [None], [1], 1, Path("a"), b"a")),
        ({"classes": []}, NO_PROMPTS),
        ({"prompts": ""}, "a prompt is empty"),
        ({"classes": [1]}, "is conditioned on 'text', not on class; leave classes out"),
        ({"factors": [1, 0]}, "factors = [1, 0]: give 3 numbers from 0 up, one per cluster"),
        ({"factors": [-1, 1, 1]}, "give 3 numbers from 0 up"),
        ({"factors": [1, np.inf, 1]}, "give 3 numbers from 0 up"),
        ({"factors": [1, np.nan, 1]}, "give 3 numbers from 0 up"),
        ({"factors": [0, 0, 0]}, "every expert is switched off; leave one on"),
        ({"factors": 1}, "factors = [1]: give 3 numbers from 0 up"),
        ({"steps": 2}, "no setting 'steps'; did you mean 'num_steps'? known: prompt, class_labels, "),
        ({"num": 0}, "num_per_prompt"),
        ({"seed": -1}, "'seed' = -1"),
        ({"strategy": "best"}, "'best': is unknown; known: bayes, "),
        ({"strategy": "bayes", "solver": "euler"}, "needs sample.solver=ancestral"),
        ({"strategy": "top-k", "strategy_params": {"top_k": 0}}, "top_k"),
    ],
    ids=str,
)
def test_what_sampling_cannot_take_is_refused_in_one_line(ensemble, arguments, words):
    refused(lambda: ensemble.sample(**arguments), words)


def test_guidance_needs_experts_that_were_trained_without_a_condition_too(tmp_path):
    folder = saved(tmp_path, condition_dropout=0.0)
    ensemble = load(folder)
    words = "key 'sample.guidance_scale' = 2.0: guidance needs a condition.kind other than none, and condition.dropout"

    refused(lambda: ensemble.sample("cat", guidance_scale=2.0), "sample:", words)
    refused(lambda: load_settings(str(folder), ["sample.guidance_scale=2.0"], allow_paths=False), str(folder), words)
    assert len(ensemble.sample("cat")) == 1


@pytest.mark.parametrize("num", [0, 1])
def test_fewer_than_two_resident_experts_are_refused(kept, num):
    refused(lambda: DecentralizedEnsemble.from_pretrained(kept, "cpu", resident_experts=num), "must be at least 2")


def test_numbers_of_numpy_are_numbers(ensemble):
    expected = images(ensemble, num=2, seed=3, num_steps=2, guidance_scale=2.0)
    numbers = {"num": np.int64(2), "seed": np.int64(3), "num_steps": np.int32(2), "guidance_scale": np.float32(2)}

    assert images(ensemble, **numbers) == expected
    assert images(ensemble, num=2, seed=3, num_steps=2, guidance_scale=2.0) == expected


def test_repeated_prompts_give_other_images(ensemble):
    trace = Trace()
    made = [image.tobytes() for image in ensemble.sample(["cat", "dog", "cat", "cat "], num=2, trace=trace)]
    of_cat = [image.tobytes() for image in ensemble.sample("cat", num=4)]

    assert made[:2] + made[4:6] == of_cat and len({*made}) == 8
    assert set(trace.weights) == {*[("cat", i) for i in range(4)], ("dog", 0), ("dog", 1), ("cat ", 0), ("cat ", 1)}


def test_a_device_that_torch_cannot_use_changes_nothing(kept, monkeypatch):
    ensemble = load(kept)
    before = images(ensemble)
    for place in ("cuda:99", "xpu", "no-such"):
        refused(lambda place=place: ensemble.to(place), f"device {place}: torch cannot use it (")

    refused(lambda: DecentralizedEnsemble.from_pretrained(kept, "no-such"), "device no-such: torch cannot use it (")

    def to(*_):
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as full, pytest.raises(torch.OutOfMemoryError):
        full.setattr(torch.nn.Module, "to", to)
        ensemble.to("meta")

    assert ensemble.device.type == "cpu" and images(ensemble) == before


def test_an_ensemble_tells_what_it_is(ensemble):
    members = "members=['expert-0', 'expert-1', 'expert-2', 'router']"
    assert repr(ensemble) == f"DecentralizedEnsemble('three', {members}, condition='text', x_shape=(3, 4, 4))"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # huggingface_hub leaves the file of a failed download open
def test_the_hub_takes_and_gives_an_ensemble(three, hub):
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
    ("kind", "name", "params", "path"),
    [
        ("caption_encoder", "clip-text", {"path": "owner/name"}, "owner/name"),
        ("caption_encoder", "t5-text", {"path": "weights"}, "weights"),
        ("image_encoder", "diffusers-vae", {"path": "../weights"}, "../weights"),
        ("caption_encoder", "hashed-words", {"size": 5, "vocabulary": "owner/name"}, "owner/name"),  # of any key
    ],
)
def test_an_encoder_that_a_stranger_names_reads_nothing(tmp_path, kind, name, params, path):
    folder = saved(tmp_path, (100,), **{kind: {"name": name, "params": params}})

    line = refused(lambda: load(folder), folder / "expert-0" / "member.json", repr(name), path, "allow_paths=True")
    assert "--allow-paths" in line
    refused(lambda: DecentralizedEnsemble.from_pretrained(at_url(folder), "cpu"), repr(name))
    allowed = DecentralizedEnsemble.from_pretrained(folder, "cpu", allow_paths=True)
    refused(lambda: allowed.sample("cat", num=1), name if "vocabulary" in params else path)  # the encoder looks for it


@pytest.mark.slow
def test_the_encoders_of_ones_own_run_may_read_paths(finished_run, tmp_path):
    run = copy_run(finished_run, tmp_path / "run")
    encoder = {"name": "clip-text", "params": {"path": str(tmp_path / "clip")}}
    edit_members(run, caption_encoder=encoder)
    record = run / "experiment.yaml"
    experiment = yaml.safe_load(record.read_text())
    experiment["prepare"]["caption_encoder"] = encoder
    record.write_text(yaml.safe_dump(experiment))
    assert len(load(run).manifest.experts) == 2
    refused(lambda: DecentralizedEnsemble.from_pretrained(at_url(run), "cpu"), "'clip-text' would load")


def edit_members(folder, **changes):
    """Edit all members as a stranger would, with a manifest whose hashes agree."""
    members = json.loads((folder / "ensemble.json").read_text())["members"]
    for entry in members:
        member = folder / entry["path"] / "member.json"
        edit(member, **changes)
        entry["member_json_sha256"] = sha256_file(member)

    edit(folder / "ensemble.json", members=members)


def test_names_of_other_classes_than_the_experts_know(three):
    about = json.loads((three / "ensemble.json").read_text())["about"]
    edit_members(three, condition={"kind": "class", "size": 3})
    edit(three / "ensemble.json", about={**about, "class_names": ["cat", "dog"]})
    refused(lambda: load(three), three / "ensemble.json", "2 class_names for 3 classes")


def test_text_experts_without_an_encoder_are_refused_when_they_need_it(three):
    edit_members(three, caption_encoder=None)
    refused(lambda: load(three).sample("cat"), "expert-0: key 'caption_encoder' is null", "fetch this artifact again")


@pytest.mark.slow
def test_export_loads_in_diffusers_with_the_same_images(finished_run, tmp_path, capsys):
    out = tmp_path / "exported"
    export = ["export", *settings(finished_run), "sample.num_steps=3", "--out", str(out)]
    assert main([*export, "--to", "diffusers", "--licence", "CC0"]) == 0
    assert "CC0" in (out / "README.md").read_text() and str(out) in capsys.readouterr().out

    pipeline = opened(out)
    got = pipeline(["red disc", "a cross"], num_images_per_prompt=2, generator=seeded(3)).images
    seed = int(torch.randint(2**63 - 1, (), generator=seeded(3)))
    of_run = DecentralizedEnsemble.from_pretrained(finished_run)
    expected = of_run.sample(["red disc", "a cross"], num=2, seed=seed, num_steps=3)
    assert [image.tobytes() for image in got] == [image.tobytes() for image in expected]
    assert len(pipeline("red disc", num_inference_steps=2, strategy="bayes").images) == 1

    pipeline.save_pretrained(tmp_path / "again")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {path.name for path in out.iterdir()}
    assert main([*export, "--to", "ensemble"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*export, "--to", "diffusers", "sample.member=expert-0"]) == 2
    assert "the network of expert-0 is 'dit', for which diffusers has no class" in capsys.readouterr().err


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def opened(out):
    return DiffusionPipeline.from_pretrained(out, custom_pipeline=str(out), trust_remote_code=True, allow_paths=True)


@pytest.fixture(scope="module")
def exported(kept, tmp_path_factory):
    out = tmp_path_factory.mktemp("diffusers") / "emoji"
    export_diffusers(load(kept).manifest, out)
    return out


@pytest.fixture
def pipeline(exported):
    return opened(exported)


def made(pipeline, *prompts, **given):
    return [image.tobytes() for image in pipeline(prompts, **given).images]


def test_generators_of_the_pipeline(pipeline):
    moving = seeded(1)
    first = made(pipeline, "cat", generator=moving)
    second = made(pipeline, "cat", generator=moving)
    assert first == made(pipeline, "cat", generator=seeded(1)) != second

    assert made(pipeline, "cat") != made(pipeline, "cat")  # torch's own generator
    torch.manual_seed(1)
    assert made(pipeline, "cat") == first

    each = [seeded(seed) for seed in (1, 2, 3, 1)]
    images = made(pipeline, "cat", "dog", num_images_per_prompt=2, generator=each)
    assert images[:1] == first and images[1:2] == made(pipeline, "cat", generator=seeded(2))
    assert images[3:] == made(pipeline, "dog", generator=seeded(1)) and len(set(images)) == 4

    for generator in (None, seeded(1), [seeded(i) for i in range(4)], [seeded(1)] * 4):
        repeated = pipeline(np.array(["cat"] * 4), generator=generator).images
        assert len({image.tobytes() for image in repeated}) == 4, generator


@pytest.mark.parametrize(("kind", "size", "more"), [("none", 0, {}), ("class", 3, {"class_labels": 2})])
def test_the_pipeline_of_ensembles_without_prompts(tmp_path, kind, size, more):
    folder = saved(tmp_path, (100,), condition=ConditionSpec(kind, size), caption_encoder=None)
    export_diffusers(load(folder).manifest, tmp_path / "out")
    pipeline = opened(tmp_path / "out")

    one, other = (pipeline(**more, generator=seeded(seed)).images[0].tobytes() for seed in (1, 2))
    both = pipeline(**more, num_images_per_prompt=2, generator=[seeded(1), seeded(2)]).images
    assert [image.tobytes() for image in both] == [one, other] and one != other

    four = {} if kind == "none" else {"class_labels": [2, "2", 2, 2]}
    repeated = pipeline(**four, num_images_per_prompt=1 if four else 4, generator=seeded(1)).images
    assert repeated[0].tobytes() == one and len({image.tobytes() for image in repeated}) == 4


@pytest.mark.slow
def test_the_snippet_for_diffusers_runs_in_a_fresh_process_without_a_trainer(exported):
    """Which has not yet imported torchvision; the one that pip installs beside a CPU torch may not fit it."""
    text = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"\n\n((?:    .*\n|\n)+?)\n(?=You call it)", text)
    told = 'print(image.size, *{"lightning", "pytorch_lightning", "streaming"} & sys.modules.keys())'
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{textwrap.dedent(snippet)}\n{told}"

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=exported.parent
    )

    assert done.stdout == "(4, 4)\n", done.stderr
    assert "XFORMERS" not in done.stderr


@pytest.mark.long
def test_the_notebook_runs_as_documented(three, tmp_path, monkeypatch):
    """In a kernel of its own that works in ``examples``, which is where ``jupyter notebook`` starts it."""
    notebook = nbformat.read(ROOT / "examples" / "sample.ipynb", as_version=4)
    assert all(cell.outputs == [] for cell in notebook.cells if cell.cell_type == "code")
    (tmp_path / "examples").mkdir()
    shutil.copytree(three, tmp_path / "runs" / "emoji_4x")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    cells = nbclient.execute(notebook, cwd=tmp_path / "examples").cells

    shown = [output.data for cell in cells for output in cell.get("outputs", []) if "data" in output]
    assert sum("image/png" in data for data in shown) == 8
    assert (tmp_path / "examples" / "without_expert_1" / "README.md").exists()


def test_steps_are_shifted_as_in_the_experts_training(tmp_path):
    """By 3, so that the middle of two steps is at 3 · 0.5 / (1 + 2 · 0.5)."""
    trace = Trace()
    load(saved(tmp_path, timestep_shift=3.0)).sample("apple", strategy="full", num=1, num_steps=2, trace=trace)
    assert trace.times.tolist() == [1, 0.75, 0]


OWN = {"solver": "dormand-prince", "solver_params": {"rtol": 0.1}, "strategy": "top-k", "strategy_params": {"top_k": 1}}


@pytest.mark.parametrize(
    ("arguments", "solver", "strategy"),
    [
        ({"seed": 1}, {"rtol": 0.1}, {"top_k": 1}),
        ({"solver": "dormand-prince", "strategy": "top-k"}, {"rtol": 0.1}, {"top_k": 1}),
        ({"solver": "euler"}, {}, {"top_k": 1}),
        ({"strategy": "full"}, {"rtol": 0.1}, {}),
        ({"strategy": "bayes"}, {}, {}),  # which has a solver of its own
    ],
    ids=str,
)
def test_params_stay_with_their_solver_and_strategy(ensemble, arguments, solver, strategy):
    found = ensemble.with_settings(**OWN).with_settings(**arguments).about.sample
    assert (found.solver_params, found.strategy_params) == (solver, strategy)
    assert asdict(ensemble.about.sample)["strategy"] == "top-1", "a copy"
