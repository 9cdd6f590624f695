"""``init``: shipped experiments are listed, or written, comments included, with the user's folder of images."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_runs import ROOT

from ddm_lightning import __version__
from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment

FILES = {path.stem: path for path in sorted((ROOT / "experiments").glob("*.yaml"))}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_without_a_name_each_experiment_has_a_line_that_says_what_it_trains_and_where(called):
    lines = called("init").splitlines()
    assert [line.split()[0] for line in lines] == list(FILES)
    assert all(re.search(r"\S{2}\. .*(CPU|H100)", line) for line in lines)
    assert not [*Path().iterdir()]


@pytest.mark.parametrize("name", ["tiny_2x", "branch_4x", "folder_4x", "imagenet_8x"])
def test_a_written_file_is_the_experiment_with_commands_that_fit_it(called, name):
    *_, following = called("init", name).splitlines()
    shipped = FILES[name].read_text("utf-8")
    assert Path(f"{name}.yaml").read_text("utf-8") == shipped.replace(f"experiments/{name}.yaml", f"{name}.yaml")
    command = following.removeprefix("next: ")
    assert command.startswith("python -m ddm_lightning ") and f" -c {name}.yaml" in command
    assert f"    {command}" in Path(f"{name}.yaml").read_text("utf-8")


@pytest.mark.parametrize(
    "folder",
    ['it\'s "my" back\\slash', "a: b, {c} #d 日本 🍎", "1e3", "s3://bucket/a b"],
)
def test_images_may_be_in_a_folder_of_any_name(called, folder):
    called("init", "folder_4x", "--images", folder)
    shipped = load_experiment(FILES["folder_4x"])
    source = replace(shipped.prepare.source, params={"path": folder, "labels": False})
    assert Path("folder_4x.yaml").read_text("utf-8").count("# ") == FILES["folder_4x"].read_text("utf-8").count("# ")
    assert load_experiment("folder_4x.yaml") == replace(shipped, prepare=replace(shipped.prepare, source=source))


def test_another_file_may_be_named_anywhere(called):
    assert called("init", "folder_4x", "--out", "other/my file.yaml") == (
        "experiment: other/my file.yaml\nneeds: pip install 'ddm_lightning[demo]'\n"
        "next: python -m ddm_lightning prepare -c 'other/my file.yaml' --dry-run\n"
    )
    assert load_experiment("other/my file.yaml") == load_experiment(FILES["folder_4x"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["tiny2x"], r"no experiment is called 'tiny2x'; did you mean 'tiny_2x'\? known: branch_4x, .*, tiny_2x"),
        (["everything"], "no experiment is called 'everything'; known: .*"),
        (["tiny_2x", "--images", "."], "--images: this experiment reads no folder of images; use folder_4x"),
        (["tiny_2x", "--out", "/dev/null/tiny.yaml"], ".*/dev/null.*"),
    ],
)
def test_what_cannot_be_written_is_refused_with_one_line(refuse, arguments, line):
    assert re.fullmatch(line, refuse("init", *arguments))
    assert not [*Path().iterdir()]


def test_settings_belong_to_the_file(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["init", "tiny_2x", "seed=1"])
    words = "unrecognized arguments: seed=1; settings are given as key=value, to commands with -c; `init --help` lists"
    assert words in capsys.readouterr().err
    assert not [*Path().iterdir()]


def test_a_file_that_exists_stays(refuse):
    Path("tiny_2x.yaml").write_text("mine")
    assert refuse("init", "tiny_2x") == "tiny_2x.yaml: exists; give another file: --out FILE"
    assert refuse("init", "tiny_2x", "--out", ".").startswith(".: exists; ")
    assert [path.read_text() for path in Path().iterdir()] == ["mine"]


def test_version_names_the_package_torch_and_the_device(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert (
        capsys.readouterr().out == f"ddm_lightning {__version__}\ntorch {torch.__version__}\ndevice: 2 x NVIDIA H100\n"
    )
