"""Trusted keys: every way to use an ensemble checks the signatures of its artifacts, wherever it is."""

from __future__ import annotations

import uuid

import fsspec
import pytest
from members.test_signatures import make_key
from model_signing import hashing, signing
from saved_ensembles import saved
from tiny_runs import copy_run

from ddm_lightning.cli.parser import main


@pytest.fixture
def lab(tmp_path):
    make_key(tmp_path / "stranger")
    return make_key(tmp_path / "lab")


@pytest.fixture(params=["saved", pytest.param("run", marks=pytest.mark.slow)])
def signed(request, tmp_path, lab):
    """A saved ensemble or a run that the lab has signed, by the library alone."""
    config = signing.Config().use_elliptic_key_signer(private_key=lab)
    config.set_hashing_config(hashing.Config().set_ignored_paths(paths=["model.sig"]))
    if request.param == "saved":
        folder = saved(tmp_path)
    else:
        folder = copy_run(request.getfixturevalue("finished_run"), tmp_path / "run")
        config.sign(folder / "prepared" / "manifest.json", folder / "prepared" / "manifest.json.sig")

    for description in folder.rglob("member.json"):
        config.sign(description.parent, description.with_name("model.sig"))

    return folder


def outcome(capsys, command, place, *more):
    """The last line of a command that fails; empty for one that does not."""
    code = main([command, "-c", str(place), *more])
    assert code in (0, 2)
    err = capsys.readouterr().err
    return err.splitlines()[-1] if code else ""


def test_sampling_checks_the_signatures(signed, lab, tmp_path, capsys):
    memory = fsspec.filesystem("memory")
    url = f"memory://{uuid.uuid4()}"
    options = ["sample.num_steps=1", "sample.num_per_prompt=1", "--out", str(tmp_path / "grid.png")]

    def sample(place, *keys):
        trust = [f"island.trusted_keys.all={tmp_path / key}.pub" for key in keys]
        return outcome(capsys, "sample", place, *options, *trust)

    memory.put(str(signed), url, recursive=True)
    for place in (signed, url):
        assert sample(place, "lab") == ""
        assert f"its signature is refused ({tmp_path / 'stranger'}.pub: " in sample(place, "stranger")
        assert f"{tmp_path / 'none'}.pub: there is no such file" in sample(place, "none")

    next(signed.glob("**/expert-1/**/model.sig")).unlink()
    memory.rm(url, recursive=True)
    memory.put(str(signed), url, recursive=True)
    for place in (signed, url):
        assert "is not signed (model.sig is missing)" in sample(place, "lab")
        assert sample(place) == "", "nobody asks"


def test_other_uses_check_them_too(signed, lab, tmp_path, capsys):
    next(signed.glob("**/expert-1/**/model.sig")).with_name("more.txt").write_text("unsigned")
    out = tmp_path / "copy"
    for command, more in {"evaluate": [], "export": ["--to", "ensemble", "--out", str(out)]}.items():
        line = outcome(capsys, command, signed, f"island.trusted_keys.all={lab}.pub", *more)
        assert "its signature is refused (" in line and "more.txt" in line

    assert not out.exists()
