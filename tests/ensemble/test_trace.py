"""The recorded trajectory: whose weights, which images, and no wait for the device."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.overrides import TorchFunctionMode
from toy_ensemble import SHAPE, WAYS, Linear, draw, two

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble.routing import Trace
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition

KEYS = [("red", 0), ("red", 1), ("blue", 0)]


def traced(ensemble=None, num=3, **options):
    trace = Trace(KEYS, KEYS[1:])
    return trace, draw(ensemble or two(), num, keys=KEYS[:num], trace=trace, **options)


@pytest.mark.parametrize(("strategy", "solver"), WAYS)
def test_every_strategy_and_solver_tells_its_way(strategy, solver):
    trace, samples = traced(strategy=strategy, solver=solver, batch_size=2)
    assert torch.equal(samples, draw(two(), 3, keys=KEYS, strategy=strategy, solver=solver, batch_size=2))
    assert list(trace.weights) == KEYS and list(trace.x_t) == list(trace.x_0) == KEYS[1:]
    assert len(trace.times) == 9 and trace.times[0] == 1 and trace.times[-1] == 0
    for weights in trace.weights.values():
        assert weights.shape == (8, 2) and torch.allclose(weights.sum(1), torch.ones(8))

    first = draw(two(), 3, keys=KEYS, num_steps=1)  # one step of Euler from t = 1 ends at the estimate of x_0
    for key, x_0 in zip(KEYS[1:], samples[1:], strict=True):
        assert trace.x_t[key].shape == trace.x_0[key].shape == (9, *SHAPE)
        assert torch.equal(trace.x_t[key][-1], x_0) and torch.equal(trace.x_0[key][-1], x_0)
        assert trace.x_t[key][0].std() > 0.5
        if strategy == "full":
            assert torch.allclose(trace.x_0[key][0], first[KEYS.index(key)], atol=1e-5)


@pytest.mark.parametrize("solver", ["euler", "heun"])
def test_steps_lead_from_one_recorded_state_to_the_next(solver):
    """Not to Heun's guess of it, which is evaluated at the same time."""
    trace, _ = traced(solver=solver)
    for key in KEYS[1:]:
        x_t = trace.x_t[key]
        x_0 = trace.x_0[key]
        times = trace.times
        for i, (t, s) in enumerate(pairwise(times)):
            velocity = (x_t[i] - x_0[i]) / t
            if solver == "heun" and s > 0:
                guess = x_t[i] + (s - t) * velocity
                velocity = (velocity + two().velocity(guess[None], s[None])[0]) / 2

            assert torch.allclose(x_t[i + 1], x_t[i] + (s - t) * velocity, atol=1e-5)

        bright = 8 * x_t[:-1].mean((1, 2, 3))  # the difference of the logits
        assert torch.allclose(trace.weights[key][:, 0], bright.sigmoid(), atol=1e-5)


def test_the_weights_of_bayes_begin_with_the_priors():
    alone = two()
    alone.router = None
    trace, _ = traced(alone, strategy="bayes", solver="ancestral")
    assert all(torch.allclose(weights[0], torch.tensor([0.25, 0.75])) for weights in trace.weights.values())
    assert all(weights[-1].max() > 0.9 for weights in trace.weights.values())


@pytest.mark.parametrize(("strategy", "solver"), [("full", "euler"), ("bayes", "ancestral")])
def test_guidance_is_part_of_the_estimate(strategy, solver):
    settings = SampleConfig(guidance="mixture", guidance_scale=2.0)
    condition = Condition.of(torch.zeros(3, dtype=torch.long))
    trace, _ = traced(condition=condition, strategy=strategy, solver=solver, settings=settings)
    plain, _ = traced(strategy=strategy, solver=solver)
    # These experts do not read the condition, so that guidance changes nothing.
    for key in KEYS[1:]:
        assert torch.allclose(trace.x_0[key][:-1], plain.x_0[key][:-1], atol=1e-4)
        assert trace.weights[key].shape == (8, 2)


def test_an_expert_that_fails_has_no_weight_on_the_way():
    ensemble = Ensemble([Linear(1.0, 0.3), Linear(float("nan"), 0.2)], two().router, [0.5, 0.5])
    trace, samples = traced(ensemble)
    assert samples.isfinite().all()
    assert all(torch.equal(weights, torch.tensor([[1.0, 0.0]] * 8)) for weights in trace.weights.values())
    assert all(x_0.isfinite().all() for x_0 in trace.x_0.values())


class Waits(TorchFunctionMode):
    """Counts the calls that wait for a device."""

    WAITING = ("cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__")

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_function__(self, function, types, arguments=(), more=None):
        self.num += getattr(function, "__name__", "") in self.WAITING
        return function(*arguments, **(more or {}))


@pytest.mark.parametrize(("strategy", "solver"), [("top-1", "euler"), ("bayes", "ancestral")])
def test_recording_waits_for_nothing_at_any_step(strategy, solver):
    nums = []
    for trace in (None, Trace(KEYS, KEYS)):
        for num_steps in (4, 12):
            with Waits() as waits:
                draw(two(), 3, keys=KEYS, strategy=strategy, solver=solver, num_steps=num_steps, trace=trace)

            nums.append(waits.num)

    assert nums[3] - nums[2] == nums[1] - nums[0] >= 8
