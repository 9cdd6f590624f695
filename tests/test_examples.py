"""The example packages install, and are found by name."""

import os
import shutil
import subprocess
import sys

import nbclient
import nbformat
import pytest
from sample_log import python_path
from tiny_runs import MEMBERS, ROOT, STEPS, finish, read_status, start

from ddm_lightning.members.meta import read_meta
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


@pytest.mark.slow
def test_the_training_notebook_makes_the_weights_of_the_command(finished_run, tmp_path, monkeypatch):
    """In a kernel of its own that works in ``examples``, which is where ``jupyter notebook`` starts it."""
    notebook = nbformat.read(ROOT / "examples" / "train.ipynb", as_version=4)
    assert all(cell.outputs == [] for cell in notebook.cells if cell.cell_type == "code")
    (tmp_path / "examples").mkdir()
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments")
    monkeypatch.setenv("PYTHONPATH", python_path())

    cells = nbclient.execute(notebook, cwd=tmp_path / "examples").cells

    for member in MEMBERS:
        artifact = f"members/{member}/artifact/model.safetensors"
        ours = tmp_path / "runs" / "tiny_notebook" / artifact
        assert ours.read_bytes() == (finished_run / artifact).read_bytes()

    shown = {cell.id: [output.get("data", {}) for output in cell.get("outputs", [])] for cell in cells}
    progress, table = shown["c3"]
    assert "60/60" in progress["text/html"] and "samples/s" in progress["text/html"]
    assert "waiting" in table["text/html"] and "<pre" in table["text/html"]
    assert ["image/png" in data for data in shown["c7"]] == [True]
    assert sum("image/png" in data for data in shown["c9"]) == 4
