from dataclasses import replace

import drawing
import numpy as np
import pytest
import torch
from artifact_files import make_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddm_lightning.encoders.images import Pixels
from ddm_lightning.ensemble import Ensemble, LoadedEnsemble, sample
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks import EXPERTS, ROUTERS

K, NUM, STEPS = 3, 5, 4
SHAPE = (3, 8, 8)


@pytest.fixture
def loaded():
    spec = ConditionSpec("text", 6)
    params = {"width": 16, "depth": 1, "num_heads": 2, "patch_size": 4}
    torch.manual_seed(0)
    experts = [EXPERTS.build("dit", params, x_shape=SHAPE, condition=spec) for _ in range(K)]
    router = ROUTERS.build("router-dit", params, x_shape=SHAPE, condition=spec, num_clusters=K)
    meta = replace(make_meta(), x_shape=SHAPE, condition=spec.to_dict(), timestep_shift=1.0)
    return LoadedEnsemble(Ensemble(experts, router, [1 / K] * K), meta)


@pytest.fixture
def cheap_features(monkeypatch):
    calls = []

    def features(images):
        calls.append(len(images))
        return torch.from_numpy(images.reshape(len(images), -1)[:, :4].astype(np.float32))

    monkeypatch.setattr(drawing, "image_features", features)
    return calls


def draw(loaded, tmp_path, method, guidance=1.0, weights="w"):
    condition = Condition.of(torch.randn(NUM, 6, generator=torch.Generator().manual_seed(0)))
    settings = drawing.Settings(NUM, STEPS, guidance, seed=0)
    done = []
    drawn = drawing.draw(method, loaded, weights, condition, settings, Pixels(), drawing.Cache(tmp_path), done.append)
    assert done[-1] == NUM
    return drawn


METHODS = {method.name: method for method in drawing.METHODS}


@pytest.mark.parametrize(
    ("name", "guidance", "experts"),
    [("top1", 1.0, 1), ("top1", 2.0, 2), ("full", 1.0, K), ("full_ancestral", 2.0, 2 * K)],
)
def test_evaluations_are_counted(loaded, tmp_path, cheap_features, name, guidance, experts):
    assert draw(loaded, tmp_path, METHODS[name], guidance).experts_a_step == experts


@pytest.mark.parametrize("name", ["top1", "full", "bayes", "bayes_from_priors"])
def test_flops_are_those_that_the_counter_sees_while_sampling(loaded, tmp_path, cheap_features, name, monkeypatch):
    counter = FlopCounterMode(display=False)

    def counted(*arguments, **settings):
        # The counter does not know the fused attention of CPUs.
        with sdpa_kernel(SDPBackend.MATH), counter:
            return sample(*arguments, **settings)

    monkeypatch.setattr(drawing, "sample", counted)
    drawn = draw(loaded, tmp_path, METHODS[name])
    assert drawn.gflop_a_step == pytest.approx(counter.get_total_flops() / (NUM * STEPS) / 1e9, rel=1e-6)


def test_images_are_drawn_once_for_the_same_weights_method_and_settings(loaded, tmp_path, cheap_features):
    first = draw(loaded, tmp_path, METHODS["top1"])
    rows = loaded.ensemble.expert_rows
    again = draw(loaded, tmp_path, METHODS["top1"])
    assert loaded.ensemble.expert_rows == rows
    assert np.array_equal(first.images, again.images)
    assert first.gflop_a_step == again.gflop_a_step
    for other in ({"guidance": 2.0}, {"weights": "others"}):
        draw(loaded, tmp_path, METHODS["top1"], **other)
    draw(loaded, tmp_path, METHODS["full"])
    assert len(list(tmp_path.glob("*.npz"))) == len(cheap_features) == 4


def test_names_are_those_that_results_use():
    assert {"top1", "full", "bayes", "monolith", "monolith_ancestral"} == {
        m.name for m in drawing.METHODS if not m.control
    }
    assert METHODS["bayes"].solver == METHODS["monolith_ancestral"].solver == "ancestral"
