"""Documents: examples in docstrings run; commands parse; files, links and test names that documents mention exist."""

import doctest
import importlib
import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from ddm_lightning.cli.parser import build_parser
from ddm_lightning.config.load import load_experiment

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "data/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")


def named(paths):
    return {"argvalues": paths, "ids": [str(path.relative_to(ROOT)) for path in paths]}


@pytest.mark.parametrize("name", ["flow.path", "flow.solvers", "flow.randomness", "networks.dit"])
def test_snippets_run(name):
    failed, tried = doctest.testmod(importlib.import_module(f"ddm_lightning.{name}"))
    assert tried and not failed


@pytest.mark.parametrize("path", **named(EXPERIMENTS))
def test_the_commands_of_a_header_parse(path, monkeypatch):
    """Commands of README and docs are parsed in tests/cli/test_cli.py."""
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"python -m ddm_lightning (\w+ -c.*?)(?: {4,}.*|\))?$", path.read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        options, overrides = build_parser().parse_known_args(shlex.split(command))
        load_experiment(options.config, [text for text in [*options.overrides, *overrides] if "member=" not in text])


@pytest.mark.parametrize("document", **named([*DOCUMENTS, *EXPERIMENTS, ROOT / "CHANGELOG.md", ROOT / "NOTICE"]))
def test_files_exist(document):
    text = document.read_text(encoding="utf-8")
    pattern = r"(?<![\w/.])(?:[a-z_0-9]+/)+[a-z_0-9.]+\.(?:py|md|yaml|json)\b|docs/images/[a-z]+\.png"
    for path in set(re.findall(pattern, text)):
        if path.startswith(("data/", "runs/", "prepared/")) and path != "data/README.md":
            continue
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "ddm_lightning", document.parent)), path


def anchors(document):
    """Anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", **named(DOCUMENTS))
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_evidence_names_tests_that_exist():
    rows = re.findall(r"`pytest ([^`]+)`", EVIDENCE)
    assert rows
    for row in rows:
        paths, _, words = row.partition(" -k ")
        text = ""
        for path in paths.split():
            for file in [ROOT / path, *(ROOT / path).rglob("test_*.py")]:
                if file.is_file():
                    text += file.name + file.read_text(encoding="utf-8")
        for word in re.findall(r"\w+", words.replace(" or ", " ")) or ["def test_"]:
            assert word in text, row


def test_benchmarks_of_the_evidence_exist_and_have_its_options():
    """Those at an earlier commit need not."""
    common = (ROOT / "benchmarks" / "common.py").read_text(encoding="utf-8")
    commands = re.findall(r"`(\w+\.py)([^`]*)`(?!,? [^|`]*at [0-9a-f]{7})", EVIDENCE)
    assert len(commands) > 10
    for script, words in commands:
        text = (ROOT / "benchmarks" / script).read_text(encoding="utf-8")
        for option in re.findall(r"--[a-z-]+", words):
            assert f'"{option}"' in text + common, (script, option)


def test_the_evidence_has_the_figures_of_its_results():
    rows = re.findall(r"\| ([^|]*) \| [^|]* \| \[[^|]*results/(\w+)\.md\) \|$", EVIDENCE, re.MULTILINE)
    assert len(rows) == EVIDENCE.count("results/")
    for figures, name in rows:
        path = ROOT / "benchmarks" / "results" / f"{name}.json"
        values = json.loads(path.read_text(encoding="utf-8"))["figures"].values()
        table = path.with_suffix(".md").read_text(encoding="utf-8")
        for figure in re.findall(r"\d+\.\d+", figures):
            digits = len(figure.partition(".")[2])
            assert figure in table or figure in {f"{value:.{digits}f}" for value in values}, (name, figure)


@pytest.mark.parametrize("document", **named(DOCUMENTS))
def test_the_targets_of_make_exist(document):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    used = re.findall(r"(?:^    |`)make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(used) <= set(targets)


def test_the_readme_is_short_and_its_images_are_small():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1250
    for name in ("samples.png", "curves.png"):
        assert (ROOT / "docs" / "images" / name).stat().st_size <= 150_000


@pytest.mark.slow
def test_the_python_api_of_the_readme_runs(finished_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Python API\n")[1].split("\n\nTraining from")[0]
    defined = {}
    for place in ("experiments/emoji_4x.yaml", "runs/emoji_4x"):
        text = text.replace(place, str(finished_run))

    exec(textwrap.dedent(text), defined)
    assert len(defined["images"]) == 4 and (tmp_path / "apple.png").exists()
