"""Guidance inside the experts and of the mixture, against closed forms of a finite set with two classes."""

from __future__ import annotations

import pytest
import torch
from toy_ensemble import sample
from two_classes import SHAPE, K, exact, mean_velocity, points_of_two_classes

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble.routing import Batch
from ddm_lightning.ensemble.strategies.routed import Full
from ddm_lightning.flow.condition import Condition

NUM = 600


@pytest.fixture
def data():
    return points_of_two_classes()


def closed_form(data, guidance, x_t, t, own):
    """Velocity guided by 3, written out from the points, of rows of the class ``own``."""
    points, clusters, classes = data
    found = []
    for row in range(len(x_t)):
        one = x_t[row : row + 1]
        time = t[row : row + 1]
        in_class = (classes == own[row]).double()
        if guidance == "mixture":
            conditional, null = (mean_velocity(points, w, one, time)[0] for w in (in_class, torch.ones_like(in_class)))
            found.append(null + 3 * (conditional - null))
            continue

        total = []
        evidence = []
        for k in range(K):
            conditional, log_density = mean_velocity(points, in_class * (clusters == k), one, time)
            null, _ = mean_velocity(points, (clusters == k).double(), one, time)
            total.append(null + 3 * (conditional - null))
            evidence.append(log_density)

        share = torch.stack(evidence).softmax(0)
        found.append((share[:, :, None, None, None] * torch.stack(total)).sum(0))

    return torch.cat(found)


def batch_of(ensemble, num, **settings):
    classes = torch.arange(num) % 2
    options = SampleConfig(guidance_scale=3.0, **settings)
    keys = [(i,) for i in range(num)]
    batch = Batch(ensemble, Condition.of(classes), keys, SHAPE, 0, options)
    generator = torch.Generator().manual_seed(2)
    x_t = torch.randn(num, *SHAPE, generator=generator, dtype=torch.float64)
    return batch, x_t, torch.linspace(0.2, 1, num, dtype=torch.float64), classes


@pytest.mark.parametrize("guidance", ["expert", "mixture"])
def test_guided_velocity_is_the_closed_form(data, guidance):
    """The mixture's is that of one guided model of all points, which a router with a condition left on misses."""
    batch, x_t, t, classes = batch_of(exact(data), 16, guidance=guidance)
    error = Full().field(batch)(x_t, t) - closed_form(data, guidance, x_t, t, classes)
    print(f"guidance of the {guidance}: largest error {error.abs().max():.1e}")
    assert error.abs().max() < 1e-5
    other = closed_form(data, {"expert": "mixture", "mixture": "expert"}[guidance], x_t, t, classes)
    assert (closed_form(data, guidance, x_t, t, classes) - other).abs().max() > 0.1


@pytest.mark.parametrize("guidance", ["expert", "mixture"])
def test_outside_its_interval_guidance_neither_acts_nor_costs(data, guidance):
    ensemble = exact(data)
    ends = torch.linspace(0.2, 1, 16, dtype=torch.float64)[[4, 9]].tolist()  # two of the times: both are inside
    batch, x_t, t, classes = batch_of(ensemble, 16, guidance=guidance, guidance_interval=ends)
    got = Full().field(batch)(x_t, t)
    inside = torch.tensor([4 <= row <= 9 for row in range(16)])
    plain = ensemble.velocity(x_t, t, Condition.of(classes))
    assert torch.equal(got[~inside], plain[~inside])
    expected = closed_form(data, guidance, x_t, t, classes)
    assert torch.allclose(got[inside], expected[inside], atol=1e-5)
    assert sum(ensemble.work.expert_rows) == K * (16 + 6 + 16)
    if guidance == "expert":  # bayes mixes the experts itself
        batch.expert_velocities(x_t, t, torch.ones(16, K, dtype=torch.bool))
        assert sum(ensemble.work.expert_rows) == K * (16 + 6 + 16 + 16 + 6)


def test_bayes_guides_the_mixture(data):
    """It starts from the router and then tracks p(k | x_t, c) and p(k | x_t): as many samples of each class's point."""
    points = data[0]
    settings = SampleConfig(guidance_scale=2.0, guidance="mixture", guidance_interval=[0.1, 0.9])
    condition = Condition.of(torch.arange(NUM) % 2)

    def shares(strategy, solver):
        options = {"num_steps": 30, "shift": 1.0, "seed": 0, "batch_size": NUM, "settings": settings}
        x_0 = sample(exact(data), condition, NUM, SHAPE, strategy=strategy, solver=solver, **options)
        nearest = torch.cdist(x_0.flatten(1).double(), points.flatten(1)).argmin(1)
        return data[1][nearest].bincount(minlength=K) / NUM

    got = shares("bayes", "ancestral")
    expected = shares("full", "ancestral")
    print(f"bayes, guidance of the mixture: shares {got.tolist()}, of one guided model {expected.tolist()}")
    assert ((got - expected).abs() < 4 * (expected * (1 - expected) * 2 / NUM).sqrt() + 1e-9).all()
