"""Weights of strategies by hand; the paper's controls on experts whose samples show their cluster."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import nn
from toy_ensemble import sample

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition

ROWS = torch.tensor([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]])
PRIORS = [0.1, 0.2, 0.7]


TOP_2 = [[0, 2 / 3, 1 / 3], [0, 1, 0], [1 / 3, 0, 2 / 3]]
FIRST = [[0, 1, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("strategy", "params", "expected"),
    [
        ("full", {}, ROWS.tolist()),
        ("top-1", {}, FIRST),
        ("top-k", {"top_k": 1}, FIRST),
        ("top-k", {}, TOP_2),
        ("top-k", {"top_k": 5}, ROWS.tolist()),
        ("top-p", {"p": 0.5}, FIRST),
        ("top-p", {"p": 0.8}, [TOP_2[0], TOP_2[1], [0.25, 0.25, 0.5]]),
        ("top-p", {"p": 1.0}, ROWS.tolist()),
        ("threshold", {"threshold": 0.0}, ROWS.tolist()),
        ("threshold", {"threshold": 0.25}, [TOP_2[0], TOP_2[1], [0.25, 0.25, 0.5]]),
        ("threshold", {"threshold": 0.9}, FIRST),  # no expert has it: the most probable one
    ],
)
def test_weights_by_hand(strategy, params, expected):
    weights = STRATEGIES.build(strategy, params).weights(ROWS)

    expected = torch.tensor(expected, dtype=torch.float32)
    if strategy == "top-k" and not params:  # of two equal shares, either
        weights[2, :2], _ = weights[2, :2].sort(descending=True)

    assert torch.allclose(weights, expected, atol=1e-6) and torch.equal(weights == 0, expected == 0)


def test_ties_keep_exactly_so_many():
    weights = STRATEGIES.build("top-1", {}).weights(torch.full((3, 4), 0.25))
    assert weights.count_nonzero(dim=1).tolist() == [1, 1, 1] and weights.sum().item() == 3


@pytest.mark.parametrize(
    ("strategy", "params", "words"),
    [
        ("top-k", {"top_k": 0}, "strategy 'top-k' refuses its params: top_k = 0 keeps no expert"),
        ("top-p", {"p": 0.0}, "must be above 0 and at most 1"),
        ("top-p", {"p": 1.5}, "must be above 0 and at most 1"),
    ],
)
def test_params_that_keep_no_expert_are_refused(strategy, params, words):
    with pytest.raises(UserError, match=words):
        STRATEGIES.build(strategy, params)


class Point(nn.Module):
    """The exact expert of a cluster that is a single point."""

    prediction = "velocity"

    def __init__(self, point):
        super().__init__()
        self.point = nn.Parameter(torch.tensor(point))
        self.num_rows = []

    def forward(self, x_t, t, _condition):
        self.num_rows.append(len(x_t))
        return (x_t - self.point) / t[:, None, None, None]


class ConstantRouter(nn.Module):
    """p(cluster) is the prior whatever the sample."""

    def forward(self, x_t, _t, _condition):
        return torch.tensor(PRIORS).log().expand(len(x_t), -1)


def points(router=None, **more):
    return Ensemble([Point(0.0), Point(1.0), Point(2.0)], router, PRIORS, **more)


def generate(strategy, router, **params):
    ensemble = points(router)
    way = {"strategy": strategy, "strategy_params": params, "solver": "euler", "num_steps": 8, "batch_size": 500}
    return sample(ensemble, None, 1000, (1, 1, 1), **way).flatten(), ensemble


def follow(found, shares):
    """Whether samples at the three points have these shares; none where a share is 0."""
    shares = np.array(shares) / sum(shares)
    counts = torch.bincount(found.round().long(), minlength=3).numpy()
    seen = shares > 0
    return counts[~seen].sum() == 0 and chisquare(counts[seen], counts.sum() * shares[seen]).pvalue > 0.01


def test_an_oracle_keeps_one_expert_and_the_priors():
    x_0, ensemble = generate("oracle", None)

    assert torch.allclose(x_0, x_0.round(), atol=1e-5) and follow(x_0, PRIORS)
    assert sum(ensemble.work.expert_rows) == 8 * 1000
    assert len(set(ensemble.experts[0].num_rows)) <= 2  # of two batches


def test_an_oracle_takes_the_clusters_that_it_is_given():
    clusters = torch.arange(10) % 3
    options = {"strategy": "oracle", "num_steps": 4, "batch_size": 4, "clusters": clusters}

    found = sample(points(ConstantRouter()), None, 10, (1, 1, 1), **options).flatten()
    assert torch.allclose(found, clusters.float(), atol=1e-5)

    fewer = Ensemble([Point(1.0), Point(2.0)], None, [0.4, 0.6], clusters=[1, 2])
    with pytest.raises(UserError, match="cluster = 0 has no expert here; choose one of 1, 2"):
        sample(fewer, None, 10, (1, 1, 1), **options)

    options["strategy_params"] = {"cluster": 1}
    assert torch.allclose(sample(fewer, None, 10, (1, 1, 1), **options), torch.ones(1), atol=1e-5)


# Images of two classes in each of the three clusters; a hundred in all, in the shares of PRIORS.
COUNTS = [[10, 0], [5, 15], [35, 35]]


@pytest.mark.parametrize(("strategy", "solver"), [("oracle", "euler"), ("sample-1", "euler"), ("bayes", "ancestral")])
def test_without_a_router_clusters_follow_the_class(strategy, solver):
    groups = torch.arange(1500) % 3  # two classes, and rows without one, which keep the number of a class
    options = {"strategy": strategy, "solver": solver, "num_steps": 4, "batch_size": 500}

    condition = Condition(groups % 2, groups < 2)
    found = sample(points(class_counts=COUNTS), condition, 1500, (1, 1, 1), **options).flatten()

    for group, shares in enumerate([[10, 5, 35], [0, 15, 35], [10, 20, 70]]):
        assert follow(found[groups == group], shares)


@pytest.mark.parametrize(
    ("counts", "label", "factors", "expected"),
    [
        (COUNTS, 0, (1, 0, 1), [10 / 45, 0, 35 / 45]),
        ([[3, 1], [2, 2], [0, 9]], 0, (1, 1, 1), [0.075 / 0.175, 0.1 / 0.175, 0]),
        ([[1, 0], [1, 0], [1, 0]], 1, (1, 1, 1), PRIORS),
        ([], 0, (1, 1, 1), PRIORS),
        ([[1, 1], [1, 1], []], 0, (1, 1, 1), PRIORS),
    ],
)
def test_shares_of_a_class_among_experts_that_changed(counts, label, factors, expected):
    """By hand: p(k | class) ∝ p(k)·p(class | k); the priors where that says nothing."""
    ensemble = points(class_counts=counts).reweighted(factors)
    condition = Condition.of(torch.tensor([label]))
    assert ensemble.prior_weights(condition, 1)[0].tolist() == pytest.approx(expected)


def test_sampling_at_each_step_ends_with_the_expert_of_the_last():
    """The last Euler step goes to the chosen point, so only its choice shows."""
    x_0, ensemble = generate("sample-each-step", ConstantRouter())

    assert torch.allclose(x_0, x_0.round(), atol=1e-5) and follow(x_0, PRIORS)
    assert sum(ensemble.work.expert_rows) == 8 * 1000
    assert len(set(ensemble.experts[0].num_rows)) > 4  # chosen anew at each of 8 steps
