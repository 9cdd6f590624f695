"""Commands on a folder or a URL: of a run, of its saved copy, and of a changed ensemble."""

import json
import uuid

import fsspec
import pytest
from saved_ensembles import saved
from tiny_runs import copy_run, settings

from ddm_lightning.cli.parser import main

FEW = ("sample.num_steps=2", "--prompt", "red disc", "--num", "2")
PIXELS = "evaluate.metrics=[{name: kid, params: {features: pixels}}]"


@pytest.fixture(scope="module")
def places(finished_run, tmp_path_factory):
    """What ``-c`` takes: a run folder, a saved ensemble, and a URL of each."""
    folder = tmp_path_factory.mktemp("places")
    run, copy, url = copy_run(finished_run, folder / "run"), folder / "saved", f"memory://{uuid.uuid4()}"
    assert main(["export", *settings(run), "--to", "ensemble", "--out", str(copy)]) == 0
    memory = fsspec.filesystem("memory")
    for name in ("run", "saved"):
        memory.put(str(folder / name), f"{url}/{name}", recursive=True)
    return {"run": str(run), "saved": str(copy), "run's URL": f"{url}/run", "saved one's URL": f"{url}/saved"}


def images(out):
    return {path.name: path.read_bytes() for path in out.with_suffix("").iterdir()}


def test_every_place_of_an_ensemble_gives_the_same_images(places, finished_run, tmp_path):
    grids = []
    for number, address in enumerate([["-c", place] for place in places.values()] + [settings(finished_run)]):
        grids.append(tmp_path / f"{number}.png")
        more = ["--strategy", "full", "--seed", "3", "--out", str(grids[-1])]
        assert main(["sample", *address, *FEW, *more]) == 0
    assert len(images(grids[0])) == 2 and len({grid.read_bytes() for grid in grids}) == 1
    assert all(images(grid) == images(grids[0]) for grid in grids)


def test_a_changed_ensemble_is_sampled_into_its_own_folder(places, tmp_path, refuse):
    assert main(["ensemble", "remove", places["run"], "expert-1", "--out", str(tmp_path / "less")]) == 0
    assert main(["sample", "-c", str(tmp_path / "less"), *FEW]) == 0
    assert len(images(tmp_path / "less" / "samples" / "top-1-001.png")) == 2


def test_a_saved_ensemble_is_scored_against_images(places, tmp_path, refuse):
    out, shards = tmp_path / "out", f"{places['saved']}/prepared/shards"
    few = ["evaluate", "-c", places["saved"], "evaluate.num_images=6", "sample.num_steps=2", PIXELS, f"--out={out}"]
    line = refuse(*few)
    assert line.startswith(f"{shards}: no held-out samples here; ") and "evaluate.reference=FOLDER" in line
    assert refuse(*few, "sample.prompts=[]").startswith(f"{shards}: no shards with captions; ")
    assert main(["sample", "-c", places["saved"], *FEW[:-1], "6", "--out", str(tmp_path / "real.png")]) == 0
    assert main([*few, f"evaluate.reference={tmp_path / 'real'}", "sample.prompts=[red disc]"]) == 0
    assert json.loads((out / "settings.json").read_text())["conditions"] == ["red disc"]
    assert "KID (pixels)" in json.loads((out / "evaluation.json").read_text())["scores"]


@pytest.mark.parametrize("command", ["diagnose", "status", "replay member=expert-0", "ema member=expert-0"])
def test_what_needs_a_run_says_so(places, refuse, command):
    name, *more = command.split()
    line = refuse(name, "-c", places["saved"], *more)
    assert (
        line
        == f"{places['saved']}: is a saved ensemble, which has no shards or checkpoints; give the run folder with -c"
    )


def test_export_takes_other_defaults_along(places, tmp_path):
    out = tmp_path / "out"
    more = ["sample.strategy=full", "sample.num_steps=7"]
    assert main(["export", "-c", places["saved one's URL"], "--to", "diffusers", "--out", str(out), *more]) == 0
    about = json.loads((out / "ensemble.json").read_text())["about"]
    assert (about["sample"]["strategy"], about["sample"]["num_steps"]) == ("full", 7)
    assert (out / "model_index.json").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("expert.train.max_steps=3", "with 'expert.train.max_steps=3': a saved ensemble takes only island, sample, "),
        ("sample.num_stepz=3", "unknown key 'sample.num_stepz'"),
        ("sample.num_steps=0", "'sample.num_steps' = 0: must be at least 1"),
        ("sample.num_steps=${seed}", "'sample.num_steps'"),
        ("sample.solver=rk4", "'sample.solver' = 'rk4': is unknown"),
        ("sample.strategy=bayes", "add sample.solver=ancestral"),
        ("sample.member=expert-0", "key 'sample.member': a saved ensemble is sampled as a whole"),
    ],
)
def test_a_setting_that_cannot_be(places, refuse, override, words):
    line = refuse("sample", "-c", places["saved"], override)
    assert line.startswith(places["saved"]) and words in line


def test_a_url_takes_no_results(places, refuse):
    for command in ("sample", "evaluate"):
        line = refuse(command, "-c", places["run's URL"])
        assert line == places["run's URL"] + ": a URL cannot hold results; add --out FOLDER"
    line = refuse("sample", "-c", "memory://none", "--out", "x.png")
    assert line.startswith("memory://none/ensemble.json: the ensemble's manifest is missing")


@pytest.mark.parametrize("command", ["sample", "evaluate"])
def test_a_strangers_encoders_read_nothing_unasked(tmp_path, refuse, command):
    encoder = {"name": "clip-text", "params": {"path": "owner/model"}}
    folder = saved(tmp_path, caption_encoder=encoder)
    line = refuse(command, "-c", str(folder))
    assert line.startswith(f"{folder / 'expert-0' / 'member.json'}: the encoder 'clip-text' would load what ")
    assert "owner/model" in line and "--allow-paths" in line
    allowed = refuse(command, "-c", str(folder), "--allow-paths", "sample.prompts=[cat]")
    assert not allowed.startswith(str(folder / "expert-0"))
