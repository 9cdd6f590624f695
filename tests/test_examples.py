"""The example packages install, and are found by name."""

import os
import shutil
import subprocess
import sys

import pytest
from tiny_runs import ROOT, STEPS, finish, read_status, start

from ddm_lightning.members.artifact import read_meta
from ddm_lightning.testing import check_expert


@pytest.fixture
def installed(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(ROOT / "examples" / "unet_expert", source)  # a build writes beside its source
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    install = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(target), str(source)]
    subprocess.run(install, check=True, capture_output=True)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(target), *([path] if path else [])]))
    monkeypatch.syspath_prepend(str(target))


@pytest.mark.long
def test_an_installed_plug_in_trains_by_name(installed, tiny_run):
    from unet_expert import SmallUNet

    check_expert(SmallUNet)
    network = "expert.network={name: small-unet, params: {width: 8}}"
    finish(start("fit", tiny_run, "member=expert-0", network, "expert.train.max_steps=3"))
    assert read_status(tiny_run, "expert-0")["step"] == 3 < STEPS["expert-0"]
    meta = read_meta(tiny_run / "members" / "expert-0" / "artifact")
    assert (meta.network, meta.params, meta.prediction) == ("small-unet", {"width": 8}, "epsilon")
