"""A sample's bits do not depend on its batch: built-in networks, strategies and solvers, float32 on a CPU."""

from __future__ import annotations

import pytest
import torch
from ensemble_networks import DIT, NETWORKS, SHAPE, conditions, randomised
from torch import nn
from toy_ensemble import sample

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.networks.rows import IndependentRows

NUM = 9
GUIDED = SampleConfig(num_steps=2, guidance_scale=2.0, guidance="mixture")


def two_of(name, params, spec, *_):
    """Widths are multiples of 32, as everywhere: elsewhere vector instructions leave a rest, which rounds otherwise."""
    params = {**params, "width": 32}
    experts = [randomised(EXPERTS.build(name, params, x_shape=SHAPE, condition=spec), k) for k in range(2)]
    router_params = {**DIT, "width": 32}
    router = ROUTERS.build("router-dit", router_params, x_shape=SHAPE, condition=spec, num_clusters=2)
    return Ensemble(experts, randomised(router, 3), [0.4, 0.6])


def check_batches(ensemble, condition, **settings):
    options = {"settings": GUIDED, "shape": SHAPE, **settings}
    whole = sample(ensemble, condition, NUM, batch_size=NUM, **options)
    for batch_size in (1, 3, 8):
        assert torch.equal(sample(ensemble, condition, NUM, batch_size=batch_size, **options), whole)


@pytest.mark.parametrize(
    ("network", "way"), [(0, ("bayes", "ancestral")), (2, ("top-1", "dpm++2m")), (3, ("sample-1", "euler"))]
)
def test_batches_change_no_bit(network, way):
    network = NETWORKS[network]
    strategy, solver = way
    check_batches(two_of(*network), conditions(network[2], NUM), strategy=strategy, solver=solver)


def test_another_shape_has_bits_of_its_own_too():
    network = NETWORKS[0]
    options = {"strategy": "top-1", "solver": "euler", "shape": (SHAPE[0], 4, 12)}
    check_batches(two_of(*network), conditions(network[2], NUM), **options)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("features", [40, 1000])
def test_a_linear_layer_multiplies_products_of_one_size(features):
    """Whatever MKL does with them: vectors by 16, tokens of many features by the sample."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(features, 24))
    with torch.no_grad(), IndependentRows():
        for shape in ([], [5], [20]):
            x = torch.randn(40, *shape, features)
            whole = network(x)
            assert torch.allclose(whole, nn.functional.linear(x, network[0].weight, network[0].bias), atol=1e-5)
            for num in (1, 2, 3, 8, 17):
                parts = [network(part) for part in x.split(num)]
                assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.usefixtures("threads")
def test_a_convolution_takes_few_rows_as_many(kernel):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(32, 64, kernel))
    x = torch.randn(17, 32, 12, 12)
    with torch.no_grad(), IndependentRows():
        whole = network(x)
        for num in (1, 3, 8):
            assert torch.equal(torch.cat([network(part) for part in x.split(num)]), whole)
