"""``oracle`` and ``sample-each-step``, the paper's controls, on experts whose samples show their cluster."""

import pytest
import torch
from scipy.stats import chisquare
from torch import nn
from toy_ensemble import sample

from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.velocity import Ensemble

PRIORS = [0.1, 0.2, 0.7]


class Point(nn.Module):
    """The exact expert of a cluster that is a single point."""

    prediction = "velocity"

    def __init__(self, point):
        super().__init__()
        self.point, self.num_rows = nn.Parameter(torch.tensor(point)), []

    def forward(self, x_t, t, _condition):
        self.num_rows.append(len(x_t))
        return (x_t - self.point) / t[:, None, None, None]


class ConstantRouter(nn.Module):
    """p(cluster) is the prior whatever the sample."""

    def forward(self, x_t, _t, _condition):
        return torch.tensor(PRIORS).log().expand(len(x_t), -1)


def generate(strategy, router, **params):
    ensemble = Ensemble([Point(0.0), Point(1.0), Point(2.0)], router, PRIORS)
    x_0 = sample(
        ensemble, None, 1000, (1, 1, 1), strategy=strategy, strategy_params=params, num_steps=8, batch_size=500
    )
    return x_0.flatten(), ensemble


def test_an_oracle_keeps_one_expert_and_the_priors():
    x_0, ensemble = generate("oracle", None)
    clusters = x_0.round()
    assert torch.allclose(x_0, clusters, atol=1e-5)
    counts = torch.bincount(clusters.long(), minlength=3)
    assert chisquare(counts.numpy(), 1000 * torch.tensor(PRIORS).numpy()).pvalue > 0.01
    assert sum(ensemble.work.expert_rows) == 8 * 1000
    assert len(set(ensemble.experts[0].num_rows)) <= 2  # of two batches
    assert torch.allclose(generate("oracle", None, cluster=1)[0], torch.ones(1000), atol=1e-5)
    with pytest.raises(UserError, match="cluster = 3 has no expert here; choose one of expert-0, expert-1, expert-2"):
        generate("oracle", None, cluster=3)


def test_an_oracle_finds_its_expert_where_another_is_missing():
    ensemble = Ensemble([Point(1.0), Point(2.0)], None, [0.4, 0.6])
    ensemble.names = ["expert-1", "expert-2"]
    settings = {"strategy": "oracle", "strategy_params": {"cluster": 1}, "num_steps": 4}
    x_0 = sample(ensemble, None, 5, (1, 1, 1), **settings, batch_size=5)
    assert torch.allclose(x_0, torch.ones_like(x_0), atol=1e-5)


def test_sampling_at_each_step_ends_with_the_expert_of_the_last():
    """The last Euler step goes to the chosen point, so only its choice shows."""
    x_0, ensemble = generate("sample-each-step", ConstantRouter())
    counts = torch.bincount(x_0.round().long(), minlength=3)
    assert torch.allclose(x_0, x_0.round(), atol=1e-5)
    assert chisquare(counts.numpy(), 1000 * torch.tensor(PRIORS).numpy()).pvalue > 0.01
    assert sum(ensemble.work.expert_rows) == 8 * 1000
    assert len(set(ensemble.experts[0].num_rows)) > 4  # chosen anew at each of 8 steps
