"""Experts that take turns compute what they compute when all are on the device."""

from dataclasses import replace

import pytest
import torch
from artifact_files import PARAMS, SHAPE, TEXT, make_meta, make_network, refused
from torch import nn
from toy_ensemble import sample

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble, write_ensemble
from ddm_lightning.ensemble.residency import ResidentExperts
from ddm_lightning.members.artifact import write_artifact

NAMES = ["expert-0", "expert-1", "expert-2", "expert-3"]


@pytest.fixture
def run_dir(tmp_path):
    """A run of four experts, of two predictions, without a router."""
    folders = []
    for k, name in enumerate(NAMES):
        prediction = ["velocity", "x_0"][k % 2]
        params = {**PARAMS, "prediction": prediction}
        meta = replace(make_meta(name), num_clusters=4, prediction=prediction, params=params)
        folders.append(tmp_path / name)
        write_artifact(folders[-1], make_network("expert", k).state_dict(), meta)

    write_ensemble(tmp_path, folders, [0.1, 0.2, 0.3, 0.4])
    return tmp_path


def test_experts_that_take_turns_sample_the_same_images(run_dir):
    settings = SampleConfig(strategy="bayes", solver="ancestral", num_steps=6)
    manifest = read_ensemble(run_dir / "ensemble.json")
    all_at_once = load_ensemble(manifest)
    in_turns = load_ensemble(manifest, resident_experts=2)
    assert isinstance(in_turns.experts, ResidentExperts)
    images = [sample(loaded, None, 5, SHAPE, settings, batch_size=5) for loaded in (all_at_once, in_turns)]
    assert torch.equal(*images)
    assert in_turns.cost(TEXT) == all_at_once.cost(TEXT)
    settings.compile = True
    refused(lambda: sample(in_turns, None, 5, SHAPE, settings, batch_size=5), "sample.resident_experts")


def test_only_so_many_experts_have_memory():
    experts = [nn.Linear(3, 3) for _ in range(5)]
    resident = ResidentExperts(experts, torch.device("cpu"), 2)
    x = torch.randn(2, 3)
    places = set()
    for k in [0, 1, 2, 3, 4, 0, 3, 3, 1]:
        placed = resident[k]
        assert torch.equal(placed(x), experts[k](x))
        places.add(resident._resident[k].result()["weight"].data_ptr())

    assert len(places) == 2 and places.isdisjoint(expert.weight.data_ptr() for expert in experts)
