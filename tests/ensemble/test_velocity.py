"""The ensemble's velocity: exact with exact members, sparse in what it evaluates, guided inside each expert."""

import pytest
import torch
from ensemble_networks import Aimed, ExactExpert, ExactRouter, FixedRouter, finite_set
from finite_set import FiniteSetOracle
from torch import nn

from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.strategies.routed import Top1, TopK
from ddm_lightning.ensemble.velocity import Ensemble, rows_by_expert
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import PREDICTIONS

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


def test_velocity_is_the_weighted_sum_of_all_experts():
    ensemble, oracle, points = exact()
    x_t, t = noisy(points, 64, 1)
    dense = torch.stack([oracle.velocity(x_t, t, k) for k in range(4)], dim=1)
    for strategy in (TopK(4), TopK(3), Top1()):
        weights = strategy.weights(oracle.cluster_posterior(x_t, t))
        got = ensemble.velocity(x_t, t, weights=strategy.weights(ensemble.probabilities(x_t, t)))
        assert torch.allclose(got, (weights[:, :, None] * dense).sum(1), atol=1e-10)


@pytest.mark.parametrize("top_k", [1, 2])
def test_only_routed_rows_are_evaluated(top_k):
    ensemble, oracle, points = exact()
    x_t, t = noisy(points, 33, 2, low=0.4)  # below, probabilities may be exactly 0
    assert oracle.cluster_posterior(x_t, t).argmax(1).unique().numel() > 1  # several experts have work
    for call in (1, 2):
        ensemble.velocity(x_t, t, weights=TopK(top_k).weights(ensemble.probabilities(x_t, t)))
        seen = sum(expert.num_rows for expert in ensemble.experts)
        assert seen == sum(ensemble.work.expert_rows) == call * 33 * top_k


def test_guidance_happens_inside_each_expert():
    values = torch.tensor([[1.0], [-2.0], [0.5], [3.0], [4.0]])
    condition = Condition(values, torch.tensor([True, True, False, True, True]))
    experts = [Aimed(1.0), Aimed(10.0)]
    x_t, t = torch.randn(5, 2, 3, 3), torch.tensor([0.1, 0.3, 0.5, 0.7, 1.0])

    class ByRow(nn.Module):
        def forward(self, *inputs):
            condition = inputs[2]
            assert isinstance(condition, Condition)
            return torch.where(condition.values > 0.8, torch.tensor([5.0, -5.0]), torch.tensor([-5.0, 5.0]))

    ensemble = Ensemble(experts, ByRow(), [0.5, 0.5])
    weights = Top1().weights(ensemble.probabilities(x_t, t, condition))
    got = ensemble.velocity(x_t, t, condition, weights=weights, guidance_scale=3.0)
    # unconditional + 3·(conditional - unconditional), each row in its own expert, by hand.
    scale = torch.tensor([1.0, 10.0, 10.0, 1.0, 1.0])
    kept = torch.tensor([1.0, -2.0, 0.0, 3.0, 4.0])
    expected = (x_t - (3 * scale * kept).reshape(-1, 1, 1, 1)) / t.reshape(-1, 1, 1, 1)
    assert torch.allclose(got, expected, atol=1e-4)
    assert [expert.num_rows for expert in experts] == [6, 4] and sum(ensemble.work.expert_rows) == 10
    ensemble.velocity(x_t, t, condition, weights=weights, guidance_scale=1.0)
    assert sum(ensemble.work.expert_rows) == 15


def test_guidance_without_a_condition_costs_nothing():
    ensemble = Ensemble([Aimed()], None, [1.0])
    x_t, t = torch.randn(4, 2), torch.full((4,), 0.5)
    plain = ensemble.velocity(x_t, t)
    assert torch.equal(ensemble.velocity(x_t, t, guidance_scale=5.0), plain)
    assert sum(ensemble.work.expert_rows) == 8


class Plain(nn.Linear):
    prediction = "velocity"

    def forward(self, x_t, *_):
        return super().forward(x_t)


class Syncs:
    """Counts calls that make the host wait for a device, or would if the tensors were on one."""

    def __init__(self, monkeypatch):
        self.num = 0
        for name in ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, method):
        def call(*inputs):
            self.num += 1
            return method(*inputs)

        return call


def test_an_evaluation_waits_for_the_device_once(monkeypatch):
    ensemble = Ensemble([Plain(3, 3) for _ in range(5)], FixedRouter([0.0, 1.0, 2.0, -1.0, 3.0]), [0.2] * 5)
    x_t, t, condition = torch.randn(9, 3), torch.full((9,), 0.5), Condition.of(torch.ones(9, 1))
    syncs = Syncs(monkeypatch)
    weights = TopK(3).weights(ensemble.probabilities(x_t, t, condition))
    ensemble.velocity(x_t, t, condition, weights=weights, guidance_scale=2.0)
    assert syncs.num == 1


def test_rows_are_grouped_by_expert():
    active = torch.rand(50, 6, generator=torch.Generator().manual_seed(0)) < 0.3
    active[:, 4] = False
    groups, num_rows = rows_by_expert(active)
    assert [group.tolist() for group in groups] == [active[:, k].nonzero()[:, 0].tolist() for k in range(6)]
    assert num_rows == active.any(1).sum()


@pytest.mark.parametrize("router_conditional", [True, False])
def test_a_router_built_without_a_condition_gets_none(router_conditional):
    router = FixedRouter([0.0, 1.0])
    ensemble = Ensemble([Aimed(), Aimed()], router, [0.5, 0.5], router_conditional=router_conditional)
    condition = Condition.of(torch.ones(3, 1))
    probabilities = ensemble.probabilities(torch.randn(3, 2), torch.full((3,), 0.5), condition)
    assert torch.allclose(probabilities, torch.tensor([0.0, 1.0]).softmax(0).expand(3, 2))
    assert router.conditions == [condition if router_conditional else None]


def test_temperatures_divide_the_logits_of_their_rows_and_times():
    router, given = FixedRouter([0.0, 1.2]), ([2.0, 4.0], [0.5, 0.25])
    ensemble = Ensemble([Aimed(), Aimed()], router, [0.5, 0.5], temperatures=given)
    x_t, t = torch.randn(3, 2), torch.tensor([0.25, 0.5, 1.0])
    without = ensemble.probabilities(x_t, t)[:, 1]
    assert torch.allclose(without, torch.tensor([1.2 / 2, 1.2 / 3, 1.2 / 4]).sigmoid())
    mixed = Condition(torch.ones(3, 1), torch.tensor([True, False, True]))
    assert torch.allclose(ensemble.probabilities(x_t, t, mixed)[:, 1], torch.tensor([2.4, 0.4, 4.8]).sigmoid())
    plain = Ensemble([Aimed(), Aimed()], router, [0.5, 0.5])
    assert torch.equal(plain.probabilities(x_t, t), router.logits.expand(3, 2).softmax(1))


def test_a_single_model_needs_no_router():
    expert, x_t, t = Aimed(), torch.randn(4, 2), torch.full((4,), 0.5)
    alone = Ensemble([expert], None, [1.0])
    for strategy in (Top1(), TopK(2)):
        got = alone.velocity(x_t, t, weights=strategy.weights(alone.probabilities(x_t, t)))
        assert torch.equal(got, expert(x_t, t, None))


def test_experts_without_a_router_name_the_remedy():
    ensemble = Ensemble([Aimed(), Aimed()], None, [0.5, 0.5])
    with pytest.raises(
        UserError, match=r"no router in this ensemble; train one \(fit member=router\) or set sample.strategy=bayes"
    ):
        ensemble.velocity(torch.randn(1, 2), torch.ones(1))


def test_networks_are_evaluated_without_dropout_and_gradients():
    class Noisy(nn.Module):
        prediction = "velocity"

        def __init__(self):
            super().__init__()
            self.linear, self.dropout = nn.Linear(2, 2), nn.Dropout(0.5)

        def forward(self, x_t, *_):
            return self.dropout(self.linear(x_t))

    ensemble = Ensemble([Noisy()], None, [1.0])
    x_t, t = torch.randn(64, 2), torch.full((64,), 0.5)
    first = ensemble.velocity(x_t, t)
    assert torch.equal(first, ensemble.velocity(x_t, t)) and not first.requires_grad
    # A distilled student learns from it, so autograd must be able to save it.
    weight = torch.ones(2, requires_grad=True)
    (first * weight).sum().backward()
    assert ensemble.device == torch.device("cpu")
