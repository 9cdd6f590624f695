"""The sampler: every strategy and solver, noise that belongs to the image, conditions that stay with their rows."""

from __future__ import annotations

import pytest
import torch
from ensemble_networks import Aimed, FixedRouter
from toy_ensemble import SHAPE, WAYS, ByBrightness, Linear, draw, two

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition


@pytest.mark.parametrize(("strategy", "solver"), WAYS)
def test_a_sample_belongs_to_its_key_whatever_its_neighbours(strategy, solver):
    keys = [("red", 0), ("red", 1), ("blue", 0), ("blue", 1), ("blue", 2)]
    way = {"strategy": strategy, "solver": solver}

    whole = draw(two(), 5, **way, keys=keys)

    assert whole.shape == (5, *SHAPE) and whole.dtype == torch.float32 and whole.isfinite().all()
    assert len({round(row.sum().item(), 4) for row in whole}) == 5
    assert not torch.allclose(draw(two(), 5, **way, keys=keys, seed=1), whole, atol=1e-2)
    for chosen, batch_size in (([0, 1, 2, 3, 4], 3), ([1, 3, 0], 2), ([3], 1)):
        part = draw(two(), len(chosen), **way, keys=[keys[i] for i in chosen], batch_size=batch_size)
        assert torch.allclose(part, whole[chosen], atol=1e-4)


def test_every_way_starts_from_the_same_noise():
    starts = []
    for strategy, solver in WAYS:
        expert = Aimed()
        draw(Ensemble([expert], None, [1.0]), strategy=strategy, solver=solver)
        assert expert.first is not None
        starts.append(expert.first)

    assert all(torch.equal(start, starts[0]) for start in starts)


def test_the_ode_of_a_gaussian_is_solved():
    # The flow keeps each sample's quantile: x_0 = mean + std·x_1, and x_1 is what an expert sees first.
    expert = Aimed()
    draw(Ensemble([expert], None, [1.0]))
    assert expert.first is not None
    got = draw(Ensemble([Linear(1.0, 0.3)], None, [1.0]), solver="heun", num_steps=100)
    assert torch.allclose(got, 1.0 + 0.3 * expert.first, atol=2e-3)


def test_the_ancestral_chain_of_a_gaussian_has_its_mean_and_spread():
    # Each step's noise must be new: repeated noise would widen the samples several times. The chain itself leaves
    # them a little narrow, the less the more steps it takes.
    got = draw(Ensemble([Linear(1.0, 0.3)], None, [1.0]), 200, solver="ancestral", num_steps=100)
    assert got.mean().item() == pytest.approx(1.0, abs=0.02) and got.std().item() == pytest.approx(0.3, rel=0.1)


@pytest.mark.parametrize(("strategy", "solver"), WAYS)
@pytest.mark.parametrize(("scale", "guidance"), [(1.0, "expert"), (2.0, "expert"), (2.0, "mixture")])
def test_conditions_stay_with_their_rows(strategy, solver, scale, guidance):
    values = torch.tensor([3.0, -1.0, 0.5, 7.0, 2.0])
    condition = Condition(values[:, None], torch.tensor([True, True, True, False, True]))
    ensemble = Ensemble([Aimed(1.0), Aimed(1.0)], ByBrightness(), [0.5, 0.5])
    settings = SampleConfig(guidance_scale=scale, guidance=guidance)
    got = draw(ensemble, 5, condition, strategy=strategy, solver=solver, settings=settings, batch_size=2)
    ends = scale * values * condition.keep
    assert torch.allclose(got, ends.reshape(-1, 1, 1, 1).expand(-1, *SHAPE), atol=1e-4)


def test_a_solver_has_params_and_rows_have_steps_of_their_own():
    few = two()
    many = two()
    loose = draw(few, solver="dormand-prince", solver_params={"rtol": 0.1, "atol": 0.1})
    tight = draw(many, solver="dormand-prince", solver_params={"rtol": 1e-5, "atol": 1e-5})
    assert sum(few.work.expert_rows) < sum(many.work.expert_rows) / 2
    assert 1e-4 < (loose - tight).abs().max() < 0.5
    with pytest.raises(UserError, match=r"'dpm\+\+2m' has no parameter 'rtol'"):
        draw(few, solver_params={"rtol": 0.1})


@pytest.mark.parametrize(("router_prior", "shares"), [(True, (0.9, 0.1)), (False, (0.25, 0.75))])
def test_bayes_starts_from_the_router_or_the_priors(router_prior, shares):
    router = FixedRouter([0.9, 0.1])
    router.logits = router.logits.log()
    condition = Condition.of(torch.ones(600, 1))
    ensemble = Ensemble([Aimed(5.0), Aimed(-5.0)], router, [0.25, 0.75])
    got = draw(
        ensemble,
        600,
        condition,
        strategy="bayes",
        strategy_params={"router_prior": router_prior},
        solver="ancestral",
        batch_size=600,
    )
    share = (got.mean((1, 2, 3)) > 0).float().mean().item()
    assert share == pytest.approx(shares[0], abs=4 * (shares[0] * shares[1] / 600) ** 0.5)
    assert len(router.conditions) == int(router_prior)  # one batch, asked once


@pytest.mark.parametrize(("strategy", "solver"), WAYS)
def test_progress_rises_to_the_number_of_samples(strategy, solver):
    if solver == "dormand-prince":
        pytest.skip("chooses its own steps")

    seen = []
    draw(two(), 5, strategy=strategy, solver=solver, batch_size=2, progress=seen.append)
    assert seen[0] == 0 and seen[-1] == 5 and seen == sorted(seen) and len(set(seen)) == 3 * 8 + 1
