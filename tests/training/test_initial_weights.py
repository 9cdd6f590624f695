"""Trainings that start from given weights, by the command line."""

import shutil

import pytest
from shards.mds import WARNINGS
from tiny_runs import TINY, prepared
from training.short_fits import SHORT, fit, member, weights

from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.weights import save_weights
from ddm_lightning.members.artifact import read_artifact
from ddm_lightning.members.meta import read_meta

pytestmark = WARNINGS


def refused(capsys, run, *settings):
    capsys.readouterr()

    assert fit(run, *settings) == 2

    err = capsys.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def images(run, *settings):
    experiment = load_experiment(TINY, [f"run_dir={run}", "sample.member=expert-0", *SHORT, *settings])
    return [image.tobytes() for image in DecentralizedEnsemble.open(experiment).sample(["red disc"], num=2, seed=3)]


def test_no_steps_hand_over_the_artifacts_own_weights(finished, tiny_run, capsys):
    source = member(finished, "artifact")
    settings = (f"expert.init_from={source}", "expert.train.max_steps=0")

    assert fit(tiny_run, *settings) == 0

    sha256 = sha256_file(source / "model.safetensors")
    assert f"expert-0: starts from {source}, SHA-256 {sha256}\n" in capsys.readouterr().err
    assert weights(tiny_run) == weights(finished)
    assert images(finished) == images(tiny_run, *settings)

    meta = read_meta(member(tiny_run, "artifact"))
    before = read_meta(source)

    assert (meta.step, meta.num_samples, meta.init_from) == (0, 0, str(source))
    assert meta.init_sha256 == before.model_sha256 == sha256
    assert meta.metrics["held_out/loss"] == pytest.approx(before.metrics["held_out/loss"], rel=1e-6)
    assert fit(tiny_run, *settings) == 0, "it is finished"


def test_an_island_needs_the_run_s_url_and_not_the_source(finished, tmp_path, capsys):
    source = tmp_path / "weights.safetensors"
    store = tmp_path / "store"
    shutil.copy(member(finished, "artifact", "model.safetensors"), source)
    settings = (f"expert.init_from={source}", f"remote={store}", "expert.train.max_steps=0")
    prepared(tmp_path / "home", *settings)
    source.unlink()

    assert fit(tmp_path / "island", *settings) == 0
    assert weights(tmp_path / "island") == weights(finished)


def test_weights_of_another_shape_are_refused_before_anything_is_prepared(finished, tmp_path, capsys):
    start = f"expert.init_from={member(finished, 'artifact')}"
    other = ["-c", str(TINY), f"run_dir={tmp_path / 'run'}", start, "expert.network.params.width=48"]

    assert main(["prepare", *other]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {TINY} with {start!r}: key 'expert.init_from': {member(finished, 'artifact')}: ")
    assert "is floats [32" in line and "partial: true" in line
    assert not (tmp_path / "run" / "prepared").exists()


def test_other_initial_weights_at_a_resume_are_refused(finished, tiny_run, tmp_path, capsys):
    source = tmp_path / "weights.safetensors"
    shutil.copy(member(finished, "artifact", "model.safetensors"), source)
    start = f"expert.init_from={source}"

    assert fit(tiny_run, start, "island.keep_checkpoints=9") == 0

    shutil.rmtree(member(tiny_run, "artifact"))
    shutil.rmtree(member(tiny_run, "checkpoints", "step-00000020.ckpt"))
    for changed in ((), ("expert.init_from=elsewhere",), (f"expert.init_from={{source: {source}, partial: true}}",)):
        line = refused(capsys, tiny_run, *changed)
        assert "expert.init_from" in line and "set those keys back" in line

    source.unlink()

    assert fit(tiny_run, start) == 0, "a resumed training does not need the source"

    shutil.rmtree(member(tiny_run, "artifact"))
    shutil.rmtree(member(tiny_run, "checkpoints", "step-00000020.ckpt"))
    shutil.rmtree(tiny_run / "initial")
    meta, state = read_artifact(member(finished, "artifact"))
    other = save_weights(source, {name: value + 1 for name, value in state.items()}, "")
    line = refused(capsys, tiny_run, start)

    assert f"started from weights with SHA-256 {meta.model_sha256}, and init_from has {other}" in line
