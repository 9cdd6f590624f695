"""Sample grids: rows of classes, the device, and memory that the number of images does not change."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from artifact_files import make_meta
from PIL import Image
from saved_ensembles import ABOUT, saved
from tiny_runs import TINY, settings

import ddm_lightning
from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.commands import _sample_command
from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.use import ensemble, samples


def by_class(kind: str = "class") -> Experiment:
    return load_experiment(TINY, [f"condition.kind={kind}", "sample.prompts=[]"])


def opened(kind: str, names: Sequence[str] | None = None) -> DecentralizedEnsemble:
    """An ensemble of three classes, without members."""
    meta = make_meta(condition=ConditionSpec(kind, 3 if kind == "class" else 0))
    about = replace(ABOUT, class_names=None if names is None else [*names])
    return DecentralizedEnsemble(EnsembleManifest((1.0,), "", {}, {"expert-0": meta}, about=about))


def test_rows_of_classes_are_named() -> None:
    def shown(*classes: str, names: Sequence[str] | None = ("cat", "2", "dog")) -> list[tuple[str, str, int]]:
        rows = opened("class", names).rows(classes=classes)
        return [(row.label, row.noise, int(row.condition.values)) for row in rows]  # type: ignore[union-attr]

    cat, two, dog = ("cat", "class 0", 0), ("2", "class 1", 1), ("dog", "class 2", 2)
    assert shown() == [cat, two, dog]
    assert shown("dog", "0", "2") == [dog, cat, two]
    assert shown("2", names=None) == [("class 2", "class 2", 2)]
    for wrong in ("3", "-1", "bird", "²"):
        with pytest.raises(
            UserError, match=rf"class '{wrong}': .* a number from 0 to 2, or a name such as cat, 2, dog"
        ):
            shown(wrong)

    twice = ("crane", "dog", "crane")
    assert [number for _, _, number in shown("0", "2", "dog", names=twice)] == [0, 2, 1]
    with pytest.raises(UserError, match="class 'crane': several classes have this name; give a number"):
        shown("crane", names=twice)


@pytest.mark.parametrize(("kind", "end"), [("text", " --prompt …"), ("class", " --class …"), ("none", "sample -c f")])
def test_the_next_command_fits_the_kind_of_condition(kind: str, end: str) -> None:
    options = argparse.Namespace(config="f", overrides=[])
    assert _sample_command(by_class(kind), options).endswith(end)


def test_memory_does_not_grow_with_the_number_of_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nums: list[int] = []

    def sample(*arguments: Any, **_: Any) -> torch.Tensor:
        nums.append(arguments[2])
        return torch.zeros(arguments[2], 3, 4, 4)

    monkeypatch.setattr(ensemble, "sample", sample)
    one = DecentralizedEnsemble.from_pretrained(saved(tmp_path, (100,)), "cpu")
    settings, grid, singles = one.about.sample, tmp_path / "grid.png", tmp_path / "singles"
    settings.num_per_prompt = 200
    samples.write_samples(one, grid, "ab", singles=singles)
    assert max(nums) == ensemble.BATCH_SIZE and sum(nums) == 400 == len(list(singles.iterdir()))
    assert np.asarray(Image.open(singles / "001-b-0199.png")).shape == (4, 4, 3)
    width = np.asarray(Image.open(grid)).shape[1]
    old, own = ("000-a-9999", "999-b-10000", "1000-c-0001", "1000-c-12345"), ("me.png", "10-me-0001.png", "000-a.txt")
    for name in (*(f"{name}.png" for name in old), *own):
        (singles / name).write_bytes(b"")
    settings.num_per_prompt = 1
    samples.write_samples(one, grid, "ab", singles=singles)
    assert {path.name for path in singles.iterdir()} == {"000-a-0000.png", "001-b-0000.png", *own}
    settings.num_per_prompt, nums[:] = 10**9, []
    samples.write_samples(one, grid, "ab")
    assert sum(nums) == 2 * samples.MAX_COLUMNS and np.asarray(Image.open(grid)).shape[1] == width


def test_it_samples_on_the_islands_device(monkeypatch: pytest.MonkeyPatch, finished_run: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for there, accelerator, device in ((True, "auto", "cuda"), (False, "auto", "cpu"), (True, "cpu", "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        experiment = load_experiment(TINY, [f"island.accelerator={accelerator}", f"run_dir={finished_run}"])
        assert DecentralizedEnsemble.open(experiment).device.type == device


def test_a_repeated_prompt_gives_the_images_of_one_row_of_as_many(finished_run: Path, tmp_path: Path) -> None:
    def written(name: str, *options: str) -> list[bytes]:
        run = [*settings(finished_run), "sample.num_steps=3", "--out", str(tmp_path / f"{name}.png")]
        assert main(["sample", *run, *options]) == 0
        return [path.read_bytes() for path in sorted((tmp_path / name).iterdir())]

    one = written("one", "--prompt", "red disc", "--num", "4")
    repeated = written("repeated", *["--prompt", "red disc"] * 2, "--prompt", "a cross", "--num", "2")
    assert repeated[:4] == one and len(set(repeated)) == 6


@pytest.mark.parametrize("strategy", ["top-1", "bayes"])
def test_the_python_api_gives_the_images_of_the_command(finished_run: Path, tmp_path: Path, strategy: str) -> None:
    prompts, grid = ["red disc", "a cross"], tmp_path / "grid.png"
    options = ["--prompt", prompts[0], "--prompt", prompts[1], "--num", "2", "--seed", "3", "--strategy", strategy]
    assert main(["sample", *settings(finished_run), *options, "--out", str(grid)]) == 0
    images = DecentralizedEnsemble.from_pretrained(finished_run).sample(prompts, strategy=strategy, num=2, seed=3)
    files = [Image.open(path) for path in sorted(grid.with_suffix("").iterdir())]
    assert [image.tobytes() for image in images] == [image.tobytes() for image in files]


def test_the_python_api_refuses_what_the_command_refuses(finished_run: Path, tmp_path: Path) -> None:
    of_run = DecentralizedEnsemble.from_pretrained(finished_run, device="cpu")
    assert len(of_run.sample("red disc", num=1, num_steps=1, solver="heun")) == 1
    for problem, wrong in {
        "'best': is unknown; known: bayes, ": {"strategy": "best"},
        "needs sample.solver=ancestral": {"strategy": "bayes", "solver": "euler"},
        "top_k": {"strategy": "top-k", "strategy_params": {"top_k": 0}},
        "num_per_prompt": {"num": 0},
        "'seed' = -1": {"seed": -1},
        "not on class": {"classes": [1]},
    }.items():
        with pytest.raises(UserError, match=problem):
            of_run.sample(["red disc"], **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"ensemble\.json"):
        DecentralizedEnsemble.from_pretrained(tmp_path)


def test_an_unconditional_experiment_takes_no_prompt() -> None:
    with pytest.raises(UserError, match=r"is conditioned on 'none', not on text; leave prompts out"):
        opened("none").rows(["red disc"])


def test_the_package_offers_the_ensemble_and_nothing_else() -> None:
    assert ddm_lightning.DecentralizedEnsemble is ensemble.DecentralizedEnsemble
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from ddm_lightning import nothing  # noqa: F401
