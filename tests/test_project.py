"""What the files around the package promise each other."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from ddm_lightning import __version__

ROOT = Path(__file__).parents[1]


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def setup_list(name):
    """A list of requirements in setup.py, without running it."""
    for node in ast.parse(text("setup.py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return [item.value for item in node.value.elts if isinstance(item, ast.Constant)]
    raise AssertionError(f"setup.py has no {name}")


def section(document, title):
    return document.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_make_without_a_target_lists_every_target():
    done = subprocess.run(["make", "-C", str(ROOT)], check=True, capture_output=True, text=True)
    targets = re.findall(r"^([a-z]+):", text("Makefile"), re.MULTILINE)
    assert {"help", "install", "demo", "test", "lint", "format", "type", "clean"} <= set(targets)
    assert re.findall(r"^  make ([a-z]+) ", done.stdout, re.MULTILINE) == targets


def test_the_contributors_guide_draws_the_layers_that_import_linter_holds():
    layers = re.search(r"^layers = \[\n(.+?)^\]", text("pyproject.toml"), re.MULTILINE | re.DOTALL)
    assert layers is not None
    held = re.findall(r'"([^"]+)"', layers.group(1))
    drawn = re.findall(r"^    (.+)$", section(text("CONTRIBUTING.md"), "Imports point one way"), re.MULTILINE)
    assert [re.split(r" {3,}", line)[0].strip() for line in drawn] == held


def test_every_bound_is_explained():
    pins = section(text("CONTRIBUTING.md"), "Pins")
    bounded = [line for line in setup_list("REQUIRED") if re.search(r"<|==|!=", line.partition(";")[0])]
    bounded += [line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    for requirement in bounded:
        name, bounds = re.match(r"([\w.-]+)(.*)", requirement.partition(";")[0]).groups()
        row = next((row for row in pins.splitlines() if row.startswith("|") and f"`{name}" in row), None)
        assert row is not None, name
        for upper in re.findall(r"(?:<|==)[\d.]+", bounds):
            assert upper in row, requirement


@pytest.mark.parametrize(
    "group",
    [
        "experts",
        "routers",
        "strategies",
        "solvers",
        "sources",
        "image_encoders",
        "caption_encoders",
        "features",
        "metrics",
    ],
)
def test_the_plug_in_page_lists_the_built_in_ones(group):
    from ddm_lightning.core import registry as registries

    registry = getattr(registries, group.upper())
    assert registry.group == f"ddm_lightning.{group}"
    row = next(row for row in text("docs/plugins.md").splitlines() if row.startswith(f"| `ddm_lightning.{group}`"))
    assert set(re.findall(r"`([\w+-]+)`", row.split("|")[2])) == set(registry.names())


def test_no_data_and_no_weights_are_committed():
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files"], check=True, capture_output=True, text=True)
    for name in done.stdout.splitlines():
        suffix = Path(name).suffix
        assert suffix not in {".svg", ".ttf", ".jpg", ".npy", ".mds", ".safetensors", ".pt"}, name
        assert suffix != ".png" or name.startswith("docs/images/"), name
        if name.startswith("data/") and name != "data/README.md":
            assert re.fullmatch(r"data/ddm_data/\w+\.py", name), name


@pytest.mark.slow
def test_a_wheel_holds_the_package_its_data_files_and_experiments_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    for name in ("ddm_lightning", "data/ddm_data", "experiments", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, source / name)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    subprocess.run([sys.executable, "-m", "pip", "wheel", *offline, "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = set()
    for folder, place in {"ddm_lightning": "", "experiments": "ddm_lightning", "data/ddm_data": ""}.items():
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted.add(str(Path(place, Path(folder).name, path.relative_to(ROOT / folder))))
    assert names == wanted
    assert re.search(r"-(\d+\.\d+\.\d+)-", wheel.name)[1] == __version__
    # Python finds the package in the wheel, which has no checkout beside it.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "-m", "ddm_lightning", "init", "tiny_2x"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    experiment = (tmp_path / "tiny_2x.yaml").read_text(encoding="utf-8")
    assert experiment == text("experiments/tiny_2x.yaml").replace("experiments/", "")
