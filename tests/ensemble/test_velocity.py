"""The ensemble's velocity: exact with exact members, sparse in what it evaluates, guided inside each expert."""

import pytest
import torch
from ensemble_networks import Aimed, ExactExpert, ExactRouter, FixedRouter, finite_set
from finite_set import FiniteSetOracle
from torch import nn

from ddm_lightning.ensemble.strategies.routed import TopK
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import PREDICTIONS

SIZES = [40, 1, 7, 22]


def exact(dim=3, seed=0):
    """Exact experts (of every kind of prediction) and router of unequal clusters."""
    points, labels = finite_set(SIZES, dim, seed)
    oracle = FiniteSetOracle(points, labels, len(SIZES))
    experts = [ExactExpert(oracle, k, PREDICTIONS[k % 3]) for k in range(len(SIZES))]
    return Ensemble(experts, ExactRouter(oracle), [size / sum(SIZES) for size in SIZES]), oracle, points


def noisy(points, num, seed, low=0.05):
    """Rows of x_t on the path of random points, with t in (low, 0.98), where an epsilon prediction is still exact."""
    generator = torch.Generator().manual_seed(seed)
    t = low + (0.98 - low) * torch.rand(num, generator=generator, dtype=torch.float64)
    x_0 = points[torch.randint(len(points), (num,), generator=generator)]
    noise = torch.randn(x_0.shape, generator=generator, dtype=torch.float64)
    return (1 - t[:, None]) * x_0 + t[:, None] * noise, t


@pytest.mark.parametrize("seed", range(5))
def test_full_ensemble_of_exact_members_is_the_whole_sets_velocity(seed):
    ensemble, _, points = exact(seed=seed)
    x_t, t = noisy(points, 200, seed)
    # The whole set's closed form, written out again: weights softmax(-|x_t - (1-t)x_0|²/2t²).
    squares = (x_t[:, None] - (1 - t)[:, None, None] * points).square().sum(2)
    mean = torch.softmax(-squares / (2 * t[:, None] ** 2), dim=1) @ points
    error = ensemble.velocity(x_t, t) - (x_t - mean) / t[:, None]
    print(f"full ensemble against the closed form: largest error {error.abs().max():.1e}")
    assert error.abs().max() < 1e-9


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_velocity_is_the_weighted_sum_of_the_routed_experts_and_evaluates_no_others(top_k):
    ensemble, oracle, points = exact()
    x_t, t = noisy(points, 64, 1, low=0.4)  # below, probabilities may be exactly 0
    dense = torch.stack([oracle.velocity(x_t, t, k) for k in range(4)], dim=1)
    weights = TopK(top_k).weights(oracle.cluster_posterior(x_t, t))
    assert top_k > 1 or weights.argmax(1).unique().numel() > 1  # several experts have work

    for call in (1, 2):
        got = ensemble.velocity(x_t, t, weights=weights)

        assert torch.allclose(got, (weights[:, :, None] * dense).sum(1), atol=1e-10)
        seen = sum(expert.num_rows for expert in ensemble.experts)
        assert seen == sum(ensemble.work.expert_rows) == call * 64 * top_k


def test_guidance_without_a_condition_costs_nothing():
    ensemble = Ensemble([Aimed()], None, [1.0])
    x_t = torch.randn(4, 2)
    t = torch.full((4,), 0.5)
    plain = ensemble.velocity(x_t, t)
    assert torch.equal(ensemble.velocity(x_t, t, guidance_scale=5.0), plain)
    assert sum(ensemble.work.expert_rows) == 8


@pytest.mark.parametrize("router_conditional", [True, False])
def test_a_router_built_without_a_condition_gets_none(router_conditional):
    router = FixedRouter([0.0, 1.0])
    ensemble = Ensemble([Aimed(), Aimed()], router, [0.5, 0.5], router_conditional=router_conditional)
    condition = Condition.of(torch.ones(3, 1))
    probabilities = ensemble.probabilities(torch.randn(3, 2), torch.full((3,), 0.5), condition)
    assert torch.allclose(probabilities, torch.tensor([0.0, 1.0]).softmax(0).expand(3, 2))
    assert router.conditions == [condition if router_conditional else None]


def test_networks_are_evaluated_without_dropout_and_gradients():
    class Noisy(nn.Module):
        prediction = "velocity"

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x_t, *_):
            return self.dropout(self.linear(x_t))

    ensemble = Ensemble([Noisy()], None, [1.0])
    x_t = torch.randn(64, 2)
    t = torch.full((64,), 0.5)
    first = ensemble.velocity(x_t, t)
    assert torch.equal(first, ensemble.velocity(x_t, t)) and not first.requires_grad
    # A distilled student learns from it, so autograd must be able to save it.
    weight = torch.ones(2, requires_grad=True)
    (first * weight).sum().backward()
    assert ensemble.device == torch.device("cpu")
