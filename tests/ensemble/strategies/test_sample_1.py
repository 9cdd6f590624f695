"""``sample-1`` with exact experts and an exact router of a finite set: it samples the set, ``top-1`` does not."""

import numpy as np
import pytest
import torch
from ensemble_networks import Aimed, ExactExpert, ExactRouter, FixedRouter
from finite_set import FiniteSetOracle
from scipy.stats import chisquare
from toy_ensemble import sample

from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition

SIZES = [5, 10, 15, 20]
PRIORS = [0.1, 0.2, 0.3, 0.4]
SHAPE = (1, 1, 2)
NUM = 2000


@pytest.fixture(scope="module")
def points():
    """Overlapping clusters, so that the posterior stays unsure for most of the way."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))
    centres = torch.randn(4, *SHAPE, generator=generator)
    return centres[labels] + 0.6 * torch.randn(len(labels), *SHAPE, generator=generator)


def exact(points):
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor(SIZES))
    oracle = FiniteSetOracle(points, labels, 4)
    return Ensemble([ExactExpert(oracle, k) for k in range(4)], ExactRouter(oracle), PRIORS)


def following(threshold):
    return {"strategy": "sample-1", "strategy_params": {"threshold": threshold}}


def counts(points, strategy, **params):
    """How many of ``NUM`` samples end at each of the 50 equally likely points."""
    settings = {"num_steps": 16, "shift": 1.0, "seed": 1, "batch_size": NUM, "solver": "heun"}
    x_0 = sample(exact(points), None, NUM, SHAPE, strategy=strategy, strategy_params=params, **settings)
    return torch.cdist(x_0.flatten(1), points.flatten(1)).argmin(1).bincount(minlength=len(points))


@pytest.mark.parametrize("threshold", [0.0, 0.7, 1.0])
def test_exact_experts_sample_every_point_equally_often(points, threshold):
    """Pearson's test of all 50 points, and of the clusters."""
    found = counts(points, "sample-1", threshold=threshold)
    clusters = torch.stack([part.sum() for part in found.split(SIZES)])
    of_points = chisquare(found).pvalue
    of_clusters = chisquare(clusters, NUM * np.array(PRIORS)).pvalue
    print(f"sample-1, threshold {threshold}: shares {(clusters / NUM).tolist()}, p {of_points:.3f}, {of_clusters:.3f}")
    assert of_points > 0.005 and of_clusters > 0.005


def test_top_1_favours_the_largest_cluster(points):
    shares = torch.stack([part.sum() for part in counts(points, "top-1").split(SIZES)]) / NUM
    print(f"top-1: shares {shares.tolist()}")
    assert shares[3] > 0.5 and (shares - torch.tensor(PRIORS)).abs().sum() / 2 > 0.1


class Steps(Aimed):
    """Counts the rows at each time."""

    def __init__(self, scale):
        super().__init__(scale)
        self.rows: dict[float, int] = {}

    def forward(self, x_t, t, condition):
        self.rows[round(t[0].item(), 4)] = len(x_t)
        return super().forward(x_t, t, condition)


SURE = torch.tensor([0.7, 0.3]).log().softmax(0)[0].numpy()


@pytest.mark.parametrize(("threshold", "num_calls"), [(0.0, 1), (0.6, 8), (SURE, 8), (np.nextafter(SURE, 1), 8)])
def test_a_sure_router_is_not_asked_to_draw_again(threshold, num_calls):
    router = FixedRouter([0.7, 0.3])
    router.logits = router.logits.log()
    threshold = float(threshold)
    expert = Steps(5.0)
    ensemble = Ensemble([expert, Steps(-5.0)], router, [0.5, 0.5])
    settings = {"num_steps": 8, "shift": 1.0, "seed": 0, "batch_size": 400}
    condition = Condition.of(torch.ones(400, 1))
    got = sample(ensemble, condition, 400, SHAPE, **following(threshold), **settings)
    assert sum(ensemble.work.expert_rows) == 400 * 8 and len(router.conditions) == num_calls
    changes = len(set(expert.rows.values())) > 1
    assert changes == (threshold > SURE)
    assert (got.mean((1, 2, 3)) > 0).float().mean().item() == pytest.approx(0.7, abs=4 * (0.21 / 400) ** 0.5)


def test_a_threshold_that_every_router_reaches_changes_no_sample(points):
    """Each step is then solved on its own, with the noise of that step."""
    settings = {"num_steps": 6, "shift": 1.0, "seed": 0, "batch_size": 50, "solver": "ancestral"}
    once, stepwise = (sample(exact(points), None, 50, SHAPE, **following(t), **settings) for t in (0.0, 1e-9))
    assert torch.allclose(once, stepwise, atol=1e-5)


def test_without_a_router_the_priors_choose_once():
    ensemble = Ensemble([Aimed(5.0), Aimed(-5.0)], None, [0.25, 0.75])
    condition = Condition.of(torch.ones(600, 1))
    settings = {"num_steps": 4, "shift": 1.0, "seed": 0, "batch_size": 200}
    got = sample(ensemble, condition, 600, SHAPE, strategy="sample-1", **settings)
    assert (got.mean((1, 2, 3)) > 0).float().mean().item() == pytest.approx(0.25, abs=4 * (0.1875 / 600) ** 0.5)
    with pytest.raises(UserError, match="no router in this ensemble"):
        sample(ensemble, condition, 600, SHAPE, **following(0.5), **settings)
