"""GFLOP per image and active experts, against torch's counter of what was run."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from toy_ensemble import sample

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.ensemble import velocity
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec

SHAPE = (3, 8, 8)
SPEC = ConditionSpec("class", 4)
PARAMS = {"width": 16, "depth": 1, "num_heads": 2, "patch_size": 4}


def loaded(depths):
    """Experts of these depths and a router without a condition."""
    torch.manual_seed(0)
    experts = [EXPERTS.build("dit", {**PARAMS, "depth": n}, x_shape=SHAPE, condition=SPEC) for n in depths]
    router = ROUTERS.build(
        "router-dit", PARAMS, x_shape=SHAPE, condition=ConditionSpec("none", 0), num_clusters=len(depths)
    )
    return Ensemble(experts, router, [1 / len(depths)] * len(depths), router_conditional=False)


@pytest.mark.parametrize(
    ("strategy", "experts", "more", "other"),
    [
        ("top-1", 1, {"guidance_scale": 2.0}, SHAPE),
        ("full", 3, {"guidance_scale": 2.0, "guidance": "mixture", "guidance_interval": [0.4, 0.6]}, (3, 16, 12)),
        ("top-k", 2, {}, (3, 4, 16)),
        ("bayes", None, {"solver": "ancestral"}, SHAPE),
    ],
)
def test_cost_is_what_the_counter_sees(strategy, experts, more, other, monkeypatch):
    """Experts of different sizes; the second call adds images and rows, of a shape like the first or another.

    Rows that only pad products do not count.
    """
    monkeypatch.setattr(velocity, "IndependentRows", nullcontext)
    ensemble = loaded([1, 2, 3])
    settings = SampleConfig(strategy=strategy, num_steps=4, **more)
    # The counter does not know the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for num, shape in ((3, SHAPE), (2, other)):
            sample(ensemble, Condition.of(torch.arange(num)), num, shape, settings, batch_size=2)

    cost = ensemble.cost(SPEC)
    assert cost.gflop == pytest.approx(counter.get_total_flops() / 5 / 1e9, rel=1e-6)
    assert experts is None or cost.experts == experts
