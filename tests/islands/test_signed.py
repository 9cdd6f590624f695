"""A run whose islands sign: trained, published, assembled, and what a hostile store could put in between."""

import shutil
from functools import partial

import pytest
from islands.watching import refused
from members.test_signatures import is_valid, make_key
from shards.mds import WARNINGS
from tiny_runs import MEMBERS, TINY, settings

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.artifact import read_artifact, write_artifact
from ddm_lightning.members.run import Run
from ddm_lightning.members.signatures import sign_artifact

pytestmark = [*WARNINGS, pytest.mark.slow]


@pytest.fixture
def lab(tmp_path):
    return make_key(tmp_path / "lab")


@pytest.fixture
def store(finished_run, tmp_path, lab, quick_prepare):
    """The finished run as its signing islands would have published it."""
    store, key = tmp_path / "store", f"island.signing_key={lab}"
    assert main(["prepare", *settings(tmp_path / "home"), f"remote={store}", key]) == 0
    run = Run(load_experiment(TINY, [*settings(store)[2:], key]))
    for name in MEMBERS:
        meta, weights = read_artifact(finished_run / "members" / name / "artifact")
        sign = partial(sign_artifact, name=name, run=run)
        write_artifact(run.folder.artifact(name), weights, meta, sign)
    return store


def test_a_hostile_store_is_found_out_before_anything_is_kept(store, tmp_path, lab, capsys):
    reader, trust = tmp_path / "reader", f"island.trusted_keys.all={lab}.pub"
    sample = ["sample", *settings(reader), f"remote={store}", trust, "sample.num_steps=2"]
    zero, one, manifest = *(store / "members" / name / "artifact" for name in MEMBERS[:2]), store / "prepared"
    zero.rename(tmp_path / "zero")
    shutil.copytree(one, zero)
    assert refused(capsys, *sample).startswith(f"{zero}: is signed as expert-1, not as expert-0; ")
    assert not (reader / "members" / "expert-0" / "artifact").exists()
    shutil.rmtree(zero)
    (tmp_path / "zero").rename(zero)
    manifest.joinpath("manifest.json.sig").rename(tmp_path / "sig")
    assert refused(capsys, *sample).startswith(f"{manifest / 'manifest.json'}: is not signed (manifest.json.sig is mis")
    (tmp_path / "sig").rename(manifest / "manifest.json.sig")
    with manifest.joinpath("manifest.json").open("a") as stream:
        stream.write(" ")
    assert refused(capsys, "fit", *settings(reader), f"remote={store}", trust, "member=expert-0").startswith(
        f"{manifest / 'manifest.json'}: its signature is refused ({lab}.pub: "
    )


def test_a_signed_run_is_assembled_and_its_signatures_travel_on(store, tmp_path, lab, capsys):
    reader, public = tmp_path / "reader", f"{lab}.pub"
    trust = [f"remote={store}", f"island.trusted_keys.all={public}"]
    saved, out, stranger = (str(tmp_path / name) for name in ("saved", "out", "stranger"))
    assert main(["export", *settings(reader), *trust, "--to", "ensemble", "--out", saved]) == 0
    assert is_valid(tmp_path / "saved" / "router", lab)
    # By hand: copied folders, and a key that is not trusted.
    make_key(tmp_path / "stranger")
    line = refused(capsys, "fit", *settings(reader), f"island.trusted_keys.all={stranger}.pub")
    assert line.startswith(f"{reader}/prepared/manifest.json: its signature is refused ({stranger}.pub: ")
    replace = ["ensemble", "replace", saved, "expert-0", str(store / "members/expert-0/artifact"), "--out", out]
    assert refused(capsys, *replace, "--trust", f"{stranger}.pub").startswith(f"{store}/members/expert-0/artifact: its")
    assert main([*replace, "--trust", public]) == 0
    assert is_valid(tmp_path / "out" / "expert-0", lab)


def test_fit_signs_what_it_trains(tiny_run, tmp_path, lab):
    quick = ["expert.train.max_steps=2", f"island.signing_key={lab}"]
    assert main(["fit", *settings(tiny_run), "member=expert-0", *quick]) == 0
    assert is_valid(tiny_run / "members/expert-0/artifact", lab)
