"""``sample.precision``: half precision within the networks, float32 around them."""

from __future__ import annotations

import pytest
import torch
from ensemble_networks import NETWORKS, SHAPE, conditions, three
from torch import nn
from toy_ensemble import sample

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble.residency import ResidentExperts

DIT = NETWORKS[0]
MMDIT = NETWORKS[2]
FULL = torch.float32
HALF = torch.bfloat16


def draw(ensemble, spec, settings):
    options = {"strategy": "full", "num_steps": 6, "shift": 1.0, "seed": 0, "batch_size": 4}
    return sample(ensemble, conditions(spec, 6), 6, SHAPE, settings=settings, **options)


def test_only_the_networks_compute_in_half_precision():
    ensemble = three(*DIT)
    seen = list[tuple[str, torch.dtype]]()
    for network in (*ensemble.experts, ensemble.router):
        assert isinstance(network, nn.Module)
        attention = next(part for part in network.modules() if hasattr(part, "qkv"))
        network.register_forward_pre_hook(
            lambda _, given: seen.extend([("x_t", given[0].dtype), ("t", given[1].dtype)])
        )
        network.time_embedding.register_forward_pre_hook(lambda _, given: seen.append(("embedded t", given[0].dtype)))
        attention.register_forward_hook(lambda *called: seen.append(("attention", called[-1].dtype)))

    ensemble.precision = "bf16-mixed"
    given = torch.randn(5, 3, 8, 8), torch.full((5,), 0.937), conditions(DIT[2], 5)
    assert ensemble.velocity(*given, weights=torch.full((5, 3), 1 / 3)).dtype == FULL
    assert {*seen} == {("x_t", FULL), ("t", FULL), ("embedded t", FULL), ("attention", HALF)}
    seen.clear()
    assert ensemble.probabilities(*given).dtype == FULL
    assert {*seen} == {("x_t", FULL), ("t", FULL), ("embedded t", FULL), ("attention", HALF)}


@pytest.mark.parametrize("network", [DIT, MMDIT])
@pytest.mark.parametrize("way", ["one by one", "in turns"])
def test_samples_in_half_precision_are_close_to_those_in_float32(network, way):
    ensemble = three(*network)
    spec = network[2]
    exact = draw(ensemble, spec, SampleConfig(precision="32-true"))
    if way == "in turns":
        ensemble.experts = ResidentExperts(list(ensemble.experts), torch.device("cpu"), 2)

    half = draw(ensemble, spec, SampleConfig(precision="bf16-mixed"))
    assert half.dtype == FULL
    assert 1e-5 < (half - exact).norm() / exact.norm() < 0.02


def test_a_cpu_computes_in_float32_unless_told_otherwise():
    ensemble = three(*DIT)
    ways = [None, SampleConfig(), SampleConfig(precision="32-true")]
    first, *others = (draw(ensemble, DIT[2], settings) for settings in ways)
    assert all(torch.equal(first, other) for other in others)
