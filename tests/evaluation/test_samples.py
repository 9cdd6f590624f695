"""Sample grids: rows of classes, the device, and memory that the number of images does not change."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from artifact_files import make_meta
from PIL import Image
from tiny_runs import TINY

from ddm_lightning.cli.commands import _sample_command
from ddm_lightning.config import Experiment, load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble import Ensemble, LoadedEnsemble
from ddm_lightning.evaluation import samples
from ddm_lightning.shards.manifest import Manifest


@pytest.fixture
def manifest(finished_run: Path) -> Manifest:
    return replace(Manifest.read(finished_run), num_classes=3, class_names=["cat", "2", "dog"])


def by_class(kind: str = "class") -> Experiment:
    return load_experiment(TINY, [f"condition.kind={kind}", "sample.prompts=[]"])


def test_rows_of_classes_are_named(manifest: Manifest) -> None:
    def shown(*classes: str, names: list[str] | None = manifest.class_names) -> list[tuple[str, str, int]]:
        rows = samples.row_conditions([], classes, by_class(), replace(manifest, class_names=names))
        return [(label, key, int(condition.values)) for label, key, condition in rows if condition is not None]

    cat, two, dog = ("cat", "class 0", 0), ("2", "class 1", 1), ("dog", "class 2", 2)
    assert shown() == [cat, two, dog]
    assert shown("dog", "0", "2") == [dog, cat, two]
    assert shown("2", names=None) == [("class 2", "class 2", 2)]
    for wrong in ("3", "-1", "bird", "²"):
        with pytest.raises(
            UserError, match=rf"--class '{wrong}': .* a number from 0 to 2, or a name such as cat, 2, dog"
        ):
            shown(wrong)


@pytest.mark.parametrize(("kind", "end"), [("text", " --prompt …"), ("class", " --class …"), ("none", "sample -c f")])
def test_the_next_command_fits_the_kind_of_condition(kind: str, end: str) -> None:
    options = argparse.Namespace(config="f", overrides=[])
    assert _sample_command(by_class(kind), options).endswith(end)


def test_memory_does_not_grow_with_the_number_of_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nums: list[int] = []

    def sample(*arguments: Any, **_: Any) -> torch.Tensor:
        nums.append(arguments[2])
        return torch.zeros(arguments[2], 3, 4, 4)

    monkeypatch.setattr(samples, "sample", sample)
    experiment = by_class("none")
    experiment.sample.num_per_prompt = 200
    loaded = LoadedEnsemble(Ensemble([torch.nn.Identity()], None, [1.0]), make_meta())
    rows = [(name, name, None) for name in "ab"]
    grid = samples.sample_grid(loaded, experiment, rows, singles=tmp_path)
    assert max(nums) == samples.BATCH_SIZE and sum(nums) == 400 == len(list(tmp_path.iterdir()))
    assert np.asarray(Image.open(tmp_path / "001-b-0199.png")).shape == (4, 4, 3)
    experiment.sample.num_per_prompt = samples.MAX_COLUMNS
    assert samples.sample_grid(loaded, experiment, rows).width == grid.width
    experiment.sample.num_per_prompt, nums[:] = 10**9, []
    samples.sample_grid(loaded, experiment, rows)
    assert sum(nums) == 2 * samples.MAX_COLUMNS


def test_it_samples_on_the_islands_device(monkeypatch: pytest.MonkeyPatch, finished_run: Path, tmp_path: Path) -> None:
    class AskedError(Exception):
        pass

    def load_ensemble(_: Path, device: torch.device) -> None:
        raise AskedError(device.type)

    monkeypatch.setattr(samples, "load_ensemble", load_ensemble)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for there, accelerator, device in ((True, "auto", "cuda"), (False, "auto", "cpu"), (True, "cpu", "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        experiment = load_experiment(TINY, [f"island.accelerator={accelerator}"])
        with pytest.raises(AskedError, match=device):
            samples.draw_run(finished_run, experiment, [], tmp_path / "grid.png")
