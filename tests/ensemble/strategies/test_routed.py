"""Weights of strategies by hand or against a loop; the paper's controls on experts whose samples show their cluster."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import nn
from toy_ensemble import sample

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.routing import strategy_of
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition

ROWS = torch.tensor([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]])
PRIORS = [0.1, 0.2, 0.7]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), num_clusters=st.integers(1, 9), top_k=st.integers(1, 12))
@pytest.mark.parametrize("name", ["full", "top-1", "top-k"])
def test_against_a_loop(name, seed, num_clusters, top_k):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(5, num_clusters, generator=generator, dtype=torch.float64).mul(3).softmax(1)
    params = {"top_k": top_k} if name == "top-k" else {}
    weights = strategy_of(SampleConfig(strategy=name, strategy_params=params)).weights(probabilities)
    num_kept = {"full": num_clusters, "top-1": 1, "top-k": min(top_k, num_clusters)}[name]
    for row, got in zip(probabilities.tolist(), weights.tolist(), strict=True):
        best = sorted(range(num_clusters), key=lambda k: -row[k])[:num_kept]
        total = sum(row[k] for k in best)
        assert got == pytest.approx([row[k] / total if k in best else 0 for k in range(num_clusters)], abs=1e-12)
        assert [k for k in range(num_clusters) if got[k] == 0] == [k for k in range(num_clusters) if k not in best]


def test_ties_keep_exactly_so_many():
    weights = STRATEGIES.build("top-1", {}).weights(torch.full((3, 4), 0.25))
    assert weights.count_nonzero(dim=1).tolist() == [1, 1, 1] and weights.sum().item() == 3


def test_top_k_must_keep_an_expert():
    with pytest.raises(UserError, match="strategy 'top-k' refuses its params: top_k = 0 keeps no expert"):
        STRATEGIES.build("top-k", {"top_k": 0})


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        (0.5, [[0, 1, 0], [0, 1, 0], [0, 0, 1]]),
        (0.8, [[0, 2 / 3, 1 / 3], [0, 1, 0], [0.25, 0.25, 0.5]]),
        (1.0, [[0.1, 0.6, 0.3], [0, 1, 0], [0.25, 0.25, 0.5]]),
    ],
)
def test_the_fewest_experts_that_reach_p(p, expected):
    assert torch.allclose(
        STRATEGIES.build("top-p", {"p": p}).weights(ROWS), torch.tensor(expected, dtype=torch.float32), atol=1e-6
    )


@pytest.mark.parametrize("p", [0.0, 1.5])
def test_p_is_a_share(p):
    with pytest.raises(UserError, match="must be above 0 and at most 1"):
        STRATEGIES.build("top-p", {"p": p})


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.0, [[0.1, 0.6, 0.3], [0, 1, 0], [0.25, 0.25, 0.5]]),
        (0.25, [[0, 2 / 3, 1 / 3], [0, 1, 0], [0.25, 0.25, 0.5]]),
        (0.9, [[0, 1.0, 0], [0, 1, 0], [0, 0, 1]]),  # no expert has it: the most probable one
    ],
)
def test_every_expert_above_the_threshold(threshold, expected):
    weights = STRATEGIES.build("threshold", {"threshold": threshold}).weights(ROWS)
    assert torch.allclose(weights, torch.tensor(expected), atol=1e-6)


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
        ensemble,
        None,
        1000,
        (1, 1, 1),
        strategy=strategy,
        strategy_params=params,
        solver="euler",
        num_steps=8,
        batch_size=500,
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
    with pytest.raises(UserError, match="cluster = 3 has no expert here; choose one of 0, 1, 2"):
        generate("oracle", None, cluster=3)


def test_an_oracle_finds_its_expert_where_another_is_missing():
    ensemble = Ensemble([Point(1.0), Point(2.0)], None, [0.4, 0.6], clusters=[1, 2])
    settings = {"strategy": "oracle", "strategy_params": {"cluster": 1}, "num_steps": 4}
    x_0 = sample(ensemble, None, 5, (1, 1, 1), **settings, batch_size=5)
    assert torch.allclose(x_0, torch.ones_like(x_0), atol=1e-5)


def test_an_oracle_takes_the_clusters_that_it_is_given():
    clusters = torch.arange(10) % 3
    ensemble = Ensemble([Point(0.0), Point(1.0), Point(2.0)], ConstantRouter(), PRIORS)
    options = {"strategy": "oracle", "num_steps": 4, "batch_size": 4, "clusters": clusters}
    assert torch.allclose(sample(ensemble, None, 10, (1, 1, 1), **options).flatten(), clusters.float(), atol=1e-5)
    ensemble.clusters = [0, 1, 7]
    with pytest.raises(UserError, match="cluster = 2 has no expert here"):
        sample(ensemble, None, 10, (1, 1, 1), **options)


# Images of two classes in each of the three clusters; a hundred in all, in the shares of PRIORS.
COUNTS = [[10, 0], [5, 15], [35, 35]]


@pytest.mark.parametrize(("strategy", "solver"), [("oracle", "euler"), ("sample-1", "euler"), ("bayes", "ancestral")])
def test_without_a_router_clusters_follow_the_class(strategy, solver):
    ensemble = Ensemble([Point(0.0), Point(1.0), Point(2.0)], None, PRIORS, class_counts=COUNTS)
    groups = torch.arange(1500) % 3  # two classes, and rows without one
    condition = Condition(groups % 2, groups < 2)
    options = {"strategy": strategy, "solver": solver, "num_steps": 4, "batch_size": 500}
    found = sample(ensemble, condition, 1500, (1, 1, 1), **options).flatten()
    for group, expected in enumerate([[10, 5, 35], [0, 15, 35], [10, 20, 70]]):
        counts = torch.bincount(found[groups == group].round().long(), minlength=3)
        seen = torch.tensor(expected) > 0
        wanted = 500 * torch.tensor(expected)[seen] / sum(expected)
        assert counts[~seen].sum() == 0 and chisquare(counts[seen].numpy(), wanted.numpy()).pvalue > 0.01


def test_shares_of_a_class_among_experts_that_changed():
    """By hand: p(k | class) ∝ p(k)·p(class | k); the priors where that says nothing."""

    def weights(counts, label, factors=(1, 1, 1)):
        ensemble = Ensemble([Point(float(k)) for k in range(3)], None, PRIORS, class_counts=counts)
        return ensemble.reweighted(factors).prior_weights(Condition.of(torch.tensor([label])), 1)[0].tolist()

    assert weights(COUNTS, 0, (1, 0, 1)) == pytest.approx([10 / 45, 0, 35 / 45])
    assert weights([[3, 1], [2, 2], [0, 9]], 0) == pytest.approx([0.075 / 0.175, 0.1 / 0.175, 0])
    assert weights([[1, 0], [1, 0], [1, 0]], 1) == weights([], 0) == weights([[1, 1], [1, 1], []], 0) == PRIORS


def test_a_row_without_its_class_has_the_shares_of_all_images():
    """Dropped conditions keep the number of a class."""
    ensemble = Ensemble([Point(float(k)) for k in range(3)], None, PRIORS, class_counts=COUNTS)
    condition = Condition(torch.tensor([0, 0]), torch.tensor([False, True]))
    dropped, kept = ensemble.prior_weights(condition, 2).tolist()
    assert dropped == PRIORS != pytest.approx(kept)


def test_sampling_at_each_step_ends_with_the_expert_of_the_last():
    """The last Euler step goes to the chosen point, so only its choice shows."""
    x_0, ensemble = generate("sample-each-step", ConstantRouter())
    counts = torch.bincount(x_0.round().long(), minlength=3)
    assert torch.allclose(x_0, x_0.round(), atol=1e-5)
    assert chisquare(counts.numpy(), 1000 * torch.tensor(PRIORS).numpy()).pvalue > 0.01
    assert sum(ensemble.work.expert_rows) == 8 * 1000
    assert len(set(ensemble.experts[0].num_rows)) > 4  # chosen anew at each of 8 steps
