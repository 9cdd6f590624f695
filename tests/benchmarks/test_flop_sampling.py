from contextlib import nullcontext
from dataclasses import replace

import flop_sampling
import pytest
import torch
from artifact_files import make_meta
from tiny_runs import TINY
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.ensemble import velocity
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.run import Run

K, NUM, STEPS = 3, 5, 4
SHAPE = (3, 8, 8)
METHODS = {method.name: method for method in flop_sampling.METHODS}


@pytest.fixture
def task(tmp_path, monkeypatch):
    """A task whose weights are an ensemble in memory."""
    spec = ConditionSpec("none", 0)
    params = {"width": 16, "depth": 1, "num_heads": 2, "patch_size": 4}
    torch.manual_seed(0)
    experts = [EXPERTS.build("dit", params, x_shape=SHAPE, condition=spec) for _ in range(K)]
    router = ROUTERS.build("router-dit", params, x_shape=SHAPE, condition=spec, num_clusters=K)
    meta = replace(make_meta(), x_shape=SHAPE, condition=spec, timestep_shift=1.0)
    weights = tmp_path / "ensemble.json"
    weights.write_text("{}")
    monkeypatch.setattr(flop_sampling.Task, "load", lambda _: (Ensemble(experts, router, [1 / K] * K), meta))
    settings = flop_sampling.Settings(NUM, STEPS, 1.0, seed=0)
    data = Run(load_experiment(TINY, [f"run_dir={tmp_path}", "condition.kind=none", "sample.prompts=[]"]))
    return flop_sampling.Task(METHODS["top1"], tmp_path, data, settings, tmp_path / "samples")


def test_evaluations_and_flops_are_those_that_the_counter_sees(task, monkeypatch):
    counter = FlopCounterMode(display=False)

    def counted(*arguments, **settings):
        # The counter does not know the fused attention of CPUs.
        with sdpa_kernel(SDPBackend.MATH), counter:
            return sample(*arguments, **settings)

    monkeypatch.setattr(flop_sampling, "sample", counted)
    monkeypatch.setattr(velocity, "IndependentRows", nullcontext)  # whose padding does not count
    flop_sampling.sample_task(task)
    found = flop_sampling.Images.read(task.path)
    assert found.images.shape == (NUM, 8, 8, 3)
    assert found.cost["gflop_per_image"] == pytest.approx(counter.get_total_flops() / NUM / 1e9, rel=1e-6)
    assert found.cost["experts_per_step"] == 1


def test_the_oracle_is_given_the_clusters_of_the_held_out_samples(task, tiny_run, monkeypatch):
    given = {}
    monkeypatch.setattr(flop_sampling, "sample", lambda *_, **more: given.update(more) or torch.zeros(NUM, *SHAPE))
    data = Run(load_experiment(TINY, [f"run_dir={tiny_run}"]))
    flop_sampling.sample_task(replace(task, method=METHODS["oracle"], data=data))
    held_out = flop_sampling.read_split(data, flop_sampling.HELD_OUT)
    assert torch.equal(given["clusters"], held_out.clusters[flop_sampling.condition_rows(len(held_out), task.settings)])


def test_the_file_belongs_to_weights_method_and_settings(task):
    paths = {task.path, replace(task, method=METHODS["full"]).path}
    paths.add(replace(task, settings=replace(task.settings, guidance_scale=2.0)).path)
    (task.weights / "ensemble.json").write_text("{ }")

    paths.add(task.path)

    assert len(paths) == 4


def test_conditions_are_all_used_equally_often_in_one_order():
    rows = flop_sampling.condition_rows(7, flop_sampling.Settings(17, 4, 1.0, seed=0))
    assert set(torch.bincount(rows).tolist()) == {2, 3}
    assert torch.equal(rows[:7], rows[7:14])
