"""Sample grids: rows of classes, the device, and memory that the number of images does not change."""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import pytest
import torch
from artifact_files import make_meta, refused
from PIL import Image
from saved_ensembles import ABOUT, saved
from tiny_runs import TINY, settings

import ddm_lightning
from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.commands import next_sample
from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.use import ensemble, loaded, samples


def by_class(kind="class"):
    return load_experiment(TINY, [f"condition.kind={kind}", "sample.prompts=[]"])


def opened(kind, names=None):
    """An ensemble of three classes, without members."""
    meta = make_meta(condition=ConditionSpec(kind, 3 if kind == "class" else 0))
    about = replace(ABOUT, class_names=None if names is None else [*names])
    return DecentralizedEnsemble(EnsembleManifest((1.0,), "", {}, {"expert-0": meta}, about=about))


@pytest.mark.parametrize(
    ("names", "classes", "expected"),
    [
        (["cat", "2", "dog"], (), [("cat", 0), ("2", 1), ("dog", 2)]),
        (["cat", "2", "dog"], ("dog", "0", "2"), [("dog", 2), ("cat", 0), ("2", 1)]),
        (None, ("2",), [("class 2", 2)]),
        (["crane", "dog", "crane"], ("0", "2", "dog"), [("crane", 0), ("crane", 2), ("dog", 1)]),
        (["1", "10", "2"], (2, "2", 1, "10", "1", 0), [("2", 2), ("2", 2), ("10", 1), ("10", 1), ("1", 0), ("1", 0)]),
    ],
)
def test_rows_of_classes_are_named(names, classes, expected):
    """A number is no name of a class, but text that is no name may be a number."""
    rows = opened("class", names).rows(classes=classes)

    found = [*zip(rows.labels, rows.condition.values.tolist() if rows.condition else [], strict=False)]
    assert found == expected
    assert rows.noise == [f"class {number}" for _, number in expected]
    assert len({rows.key(8 * row, 8) for row in range(len(rows.labels))}) == len(rows.labels)


KNOWN = "a number from 0 to 2, or a name such as cat, 2, cat"


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        *(
            ("class", {"classes": [wrong]}, f"class {wrong!r}: no such class; give {KNOWN}")
            for wrong in ("3", "-1", "²")
        ),
        ("class", {"classes": [10]}, f"class 10: no such class; give {KNOWN}"),
        ("class", {"classes": ["cat"]}, "class 'cat': several classes have this name; give a number"),
        ("none", {"prompts": ["red disc"]}, "is conditioned on 'none', not on text; leave prompts out"),
    ],
)
def test_rows_that_cannot_be(kind, given, words):
    refused(lambda: opened(kind, ["cat", "2", "cat"]).rows(**given), words)


@pytest.mark.parametrize(("kind", "end"), [("text", " --prompt …"), ("class", " --class …"), ("none", "sample -c f")])
def test_the_next_command_fits_the_kind_of_condition(kind, end):
    options = argparse.Namespace(config="f", overrides=[])
    assert next_sample(by_class(kind), options).endswith(end)


def test_memory_does_not_grow_with_the_number_of_images(monkeypatch, tmp_path):
    nums = []

    def sample(*arguments, **_):
        nums.append(arguments[2])
        return torch.zeros(arguments[2], 3, 4, 4)

    monkeypatch.setattr(loaded, "sample", sample)
    one = DecentralizedEnsemble.from_pretrained(saved(tmp_path, (100,)), "cpu")
    grid = tmp_path / "grid.png"
    singles = tmp_path / "singles"

    def write(num, singles):
        one.about.sample.num_per_prompt = num
        nums.clear()
        samples.write_samples(one, grid, "ab", singles=singles)
        return np.asarray(Image.open(grid)).shape[1]

    width = write(200, singles)
    assert max(nums) == loaded.BATCH_SIZE and sum(nums) == 400 == len(list(singles.iterdir()))
    assert np.asarray(Image.open(singles / "001-b-0199.png")).shape == (4, 4, 3)

    own = ("me.png", "10-me-0001.png", "000-a.txt")
    for name in ("000-a-9999.png", "999-b-10000.png", "1000-c-0001.png", "1000-c-12345.png", *own):
        (singles / name).write_bytes(b"")

    write(1, singles)
    assert {path.name for path in singles.iterdir()} == {"000-a-0000.png", "001-b-0000.png", *own}

    assert write(10**9, None) == width and sum(nums) == 2 * samples.MAX_COLUMNS


def test_it_samples_on_the_islands_device(monkeypatch, finished_run):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for there, accelerator, device in ((True, "auto", "cuda"), (False, "auto", "cpu"), (True, "cpu", "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        experiment = load_experiment(TINY, [f"island.accelerator={accelerator}", f"run_dir={finished_run}"])
        assert DecentralizedEnsemble.open(experiment).device.type == device


@pytest.mark.parametrize("strategy", ["top-1", "bayes"])
def test_the_python_api_gives_the_images_of_the_command(finished_run, tmp_path, strategy):
    prompts = ["red disc", "a cross", "red disc"]
    grid = tmp_path / "grid.png"
    options = ["--num", "2", "--seed", "3", "--strategy", strategy, "sample.num_steps=3", "--out", str(grid)]
    for prompt in prompts:
        options += ["--prompt", prompt]

    assert main(["sample", *settings(finished_run), *options]) == 0
    of_run = DecentralizedEnsemble.from_pretrained(finished_run)
    images = of_run.sample(prompts, strategy=strategy, num=2, seed=3, num_steps=3)

    files = [Image.open(path).tobytes() for path in sorted(grid.with_suffix("").iterdir())]
    assert [image.tobytes() for image in images] == files and len({*files}) == 6


def test_the_package_offers_the_ensemble_and_nothing_else():
    assert ddm_lightning.DecentralizedEnsemble is ensemble.DecentralizedEnsemble
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from ddm_lightning import nothing  # noqa: F401
