"""Artifacts that were copied together from islands: what does not belong there is named, nothing is trained."""

import json
import shutil
import subprocess
import sys

import pytest
from tiny_runs import MEMBERS, settings


@pytest.fixture
def run(finished_run, tmp_path):
    """The manifest and the artifacts, no more."""
    run = tmp_path / "run"
    (run / "prepared").mkdir(parents=True)
    shutil.copy(finished_run / "prepared" / "manifest.json", run / "prepared")
    for member in MEMBERS:
        shutil.copytree(finished_run / "members" / member / "artifact", run / "members" / member / "artifact")
    return run


def test_they_are_assembled_without_the_source(called, run, finished_run, monkeypatch):
    def prepare(*_, **__):
        raise AssertionError("something was prepared")

    monkeypatch.setattr("ddm_lightning.prepare.stages.prepare", prepare)
    called("fit", *settings(run))
    for name in ("ensemble.json", "samples/top-1.png"):
        assert (run / name).read_bytes() == (finished_run / name).read_bytes()


def test_a_late_artifact_is_waited_for_and_not_trained(refuse, run):
    shutil.rmtree(run / "members" / "expert-1")
    before = sorted(run.rglob("*"))
    line = refuse("fit", *settings(run))
    manifest = run / "prepared" / "manifest.json"
    assert line.startswith(f"{manifest}: was prepared elsewhere, and the artifacts of expert-1 are not here; ")
    assert line.endswith(f"copy them to {run / 'members'}/NAME/artifact, or train one with member=expert-1")
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize(
    ("member", "key", "value", "more"),
    [
        ("expert-0", "step", 20, []),
        ("expert-0", "step", 20, ["member=expert-0"]),
        # As many steps on the same clusters: nothing else tells it from the right one.
        ("expert-0", "network", "another", []),
        ("router", "params", {"width": 48, "depth": 1}, []),
        ("expert-0", "timestep_shift", 3.0, []),
        ("router", "normalisation", {"scale": 2.0, "shift": 0.0}, []),
        ("router", "num_samples", 7, []),
        ("router", "num_samples", 7000, []),
    ],
)
def test_an_artifact_of_other_settings_is_not_the_experiments(refuse, run, member, key, value, more):
    artifact = run / "members" / member / "artifact"
    meta = json.loads((artifact / "member.json").read_text(encoding="utf-8"))
    other = {**meta, key: value}
    other["max_steps"] = other["step"]  # it has not ended early
    (artifact / "member.json").write_text(json.dumps(other), encoding="utf-8")

    line = refuse("fit", *settings(run), *more)

    words = f"has {key} = {value!r} in member.json, and the experiment asks for {meta[key]!r}; copy the right one there"
    assert line.startswith(f"{artifact}: {words}, remove {artifact.parent} to train {member} anew")


@pytest.mark.parametrize("harm", ["another", "cut", "missing"])
def test_weights_that_are_not_the_described_ones_make_no_samples(called, refuse, run, harm):
    ours = run / "members" / "expert-0" / "artifact" / "model.safetensors"
    whole = ours.read_bytes()
    if harm == "another":
        shutil.copy(run / "members" / "expert-1" / "artifact" / "model.safetensors", ours)
    elif harm == "cut":
        ours.write_bytes(whole[:-8])
    else:
        ours.unlink()

    assert refuse("fit", *settings(run)).startswith(f"{ours}: ")

    assert not (run / "samples").exists()
    ours.write_bytes(whole)
    called("fit", *settings(run))
    assert (run / "samples" / "top-1.png").exists()


def test_a_folder_in_the_ensembles_place_is_one_line(refuse, run):
    (run / "ensemble.json").mkdir()
    assert refuse("fit", *settings(run)).startswith(f"{run / 'ensemble.json'}: Is a directory; ")
    assert (run / "ensemble.json").is_dir()


def test_artifacts_of_two_members_that_are_swapped(refuse, run):
    ours = run / "members" / "expert-0" / "artifact"
    shutil.rmtree(ours)
    shutil.copytree(run / "members" / "expert-1" / "artifact", ours)
    line = refuse("fit", *settings(run))
    assert line.startswith(f"{ours}: has member = 'expert-1' in member.json, and the experiment asks for 'expert-0'")


def test_a_reader_that_has_enough_is_no_error():
    command = [sys.executable, "-m", "ddm_lightning", "config", "--describe"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""
    assert process.returncode == 1
