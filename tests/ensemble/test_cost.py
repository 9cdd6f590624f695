"""GFLOP per image and active experts, against torch's counter of what was run."""

import pytest
import torch
from artifact_files import make_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.ensemble.load import LoadedEnsemble
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition, ConditionSpec

SHAPE = (3, 8, 8)
PARAMS = {"width": 16, "depth": 1, "num_heads": 2, "patch_size": 4}


def loaded(depths):
    """Experts of these depths and a router without a condition."""
    torch.manual_seed(0)
    spec = ConditionSpec("class", 4)
    experts = [EXPERTS.build("dit", {**PARAMS, "depth": n}, x_shape=SHAPE, condition=spec) for n in depths]
    router = ROUTERS.build(
        "router-dit", PARAMS, x_shape=SHAPE, condition=ConditionSpec("none", 0), num_clusters=len(depths)
    )
    meta = make_meta()
    meta.condition.update(kind="class", size=4)
    object.__setattr__(meta, "x_shape", SHAPE)
    return LoadedEnsemble(Ensemble(experts, router, [1 / len(depths)] * len(depths), router_conditional=False), meta)


@pytest.mark.parametrize(
    ("strategy", "experts", "more"),
    [
        ("top-1", 1, {"guidance_scale": 2.0}),
        ("full", 3, {"guidance_scale": 2.0, "guidance": "mixture", "guidance_interval": [0.4, 0.6]}),
        ("top-k", 2, {}),
        ("bayes", None, {"solver": "ancestral"}),
    ],
)
def test_cost_is_what_the_counter_sees(strategy, experts, more):
    """Experts of different sizes; the second call adds images and rows."""
    ensemble = loaded([1, 2, 3])
    settings = SampleConfig(strategy=strategy, num_steps=4, **more)
    # The counter does not know the fused attention of CPUs.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for num in (3, 2):
            ensemble.sample(settings, Condition.of(torch.arange(num)), num, seed=0, batch_size=2)
    assert ensemble.cost.gflop == pytest.approx(counter.get_total_flops() / 5 / 1e9, rel=1e-6)
    assert experts is None or ensemble.cost.experts == experts
