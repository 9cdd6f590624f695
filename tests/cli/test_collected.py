"""Artifacts that were copied together from islands: what does not belong there is named, nothing is trained."""

import json
import shutil
import subprocess
import sys

import pytest
from tiny_runs import MEMBERS, STEPS, copy_run, settings

from ddm_lightning.cli.parser import main


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main([*arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def run(finished_run, tmp_path):
    """The manifest and the artifacts, no more."""
    run = tmp_path / "run"
    (run / "prepared").mkdir(parents=True)
    shutil.copy(finished_run / "prepared" / "manifest.json", run / "prepared")
    for member in MEMBERS:
        shutil.copytree(finished_run / "members" / member / "artifact", run / "members" / member / "artifact")
    return run


def test_a_late_artifact_is_waited_for_and_not_trained(run, capsys):
    shutil.rmtree(run / "members" / "expert-1")
    before = sorted(run.rglob("*"))
    line = refused(capsys, "fit", *settings(run))
    manifest, there = run / "prepared" / "manifest.json", f"{run / 'members'}/NAME/artifact"
    assert line.startswith(f"error: {manifest}: was prepared elsewhere, and the artifacts of expert-1 are not here; ")
    assert line.endswith(f"copy them to {there}, or train one with member=expert-1")
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("more", [[], ["member=expert-0"]])
def test_an_artifact_of_fewer_steps_is_not_the_experiments(run, capsys, more):
    artifact = run / "members" / "expert-0" / "artifact"
    meta = json.loads((artifact / "member.json").read_text(encoding="utf-8"))
    (artifact / "member.json").write_text(json.dumps({**meta, "step": 20}), encoding="utf-8")
    line = refused(capsys, "fit", *settings(run), *more)
    words = f"has step = 20 in member.json, and the experiment asks for {STEPS['expert-0']}; copy the right one there"
    assert line.startswith(f"error: {artifact}: {words}, remove {artifact.parent} to train expert-0 anew")


@pytest.mark.parametrize(
    ("member", "key", "value"),
    [
        ("expert-0", "network", "another"),
        ("router", "params", {"width": 48, "depth": 1}),
        ("expert-0", "timestep_shift", 3.0),
        ("router", "normalisation", {"scale": 2.0, "shift": 0.0}),
    ],
)
def test_an_artifact_of_another_network_is_not_the_experiments(run, capsys, member, key, value):
    # As many steps on the same clusters: nothing else tells it from the right one.
    artifact = run / "members" / member / "artifact"
    meta = json.loads((artifact / "member.json").read_text(encoding="utf-8"))
    (artifact / "member.json").write_text(json.dumps({**meta, key: value}), encoding="utf-8")
    line = refused(capsys, "fit", *settings(run))
    words = f"has {key} = {value!r} in member.json, and the experiment asks for {meta[key]!r}"
    assert line.startswith(f"error: {artifact}: {words}; copy the right one there")


@pytest.mark.parametrize("num", [7, 7000])
def test_an_artifact_of_another_batch_is_not_the_experiments(run, capsys, num):
    artifact = run / "members" / "router" / "artifact"
    meta = json.loads((artifact / "member.json").read_text(encoding="utf-8"))
    (artifact / "member.json").write_text(json.dumps({**meta, "num_samples": num}), encoding="utf-8")
    words = f"has num_samples = {num} in member.json, and the experiment asks for {meta['num_samples']}; copy"
    assert refused(capsys, "fit", *settings(run)).startswith(f"error: {artifact}: {words}")


@pytest.mark.parametrize("harm", ["another", "cut", "missing"])
def test_weights_that_are_not_the_described_ones_make_no_ensemble(run, capsys, harm):
    ours, other = (run / "members" / member / "artifact" / "model.safetensors" for member in ("expert-0", "expert-1"))
    whole = ours.read_bytes()
    changed = {"another": other.read_bytes(), "cut": whole[:-8], "missing": b""}[harm]
    ours.unlink() if harm == "missing" else ours.write_bytes(changed)
    assert refused(capsys, "fit", *settings(run)).startswith(f"error: {ours}: ")
    assert not (run / "ensemble.json").exists()
    ours.write_bytes(whole)
    assert main(["fit", *settings(run)]) == 0
    assert (run / "ensemble.json").exists()


def test_a_folder_in_the_ensembles_place_is_one_line(run, capsys):
    (run / "ensemble.json").mkdir()
    line = refused(capsys, "fit", *settings(run))
    assert line.startswith(f"error: {run / 'ensemble.json'}: Is a directory; ")
    assert (run / "ensemble.json").is_dir()


def test_artifacts_of_two_members_that_are_swapped(run, capsys):
    ours, other = (run / "members" / member / "artifact" for member in ("expert-0", "expert-1"))
    shutil.rmtree(ours)
    shutil.copytree(other, ours)
    line = refused(capsys, "fit", *settings(run))
    assert line.startswith(
        f"error: {ours}: has member = 'expert-1' in member.json, and the experiment asks for 'expert-0'; copy"
    )


def test_a_reader_that_has_enough_is_no_error(finished_run, tmp_path):
    run = copy_run(finished_run, tmp_path / "run")
    command = [sys.executable, "-m", "ddm_lightning", "status", *settings(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert said == b""
    assert process.returncode == 1
