"""Experts in one batch compute what they compute one after the other, and share memory with the stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ensemble_networks import DIT, NETWORKS, SHAPE, conditions, three
from torch import Tensor

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.ensemble.routing import sample
from ddm_lightning.flow.condition import Condition, ConditionSpec


@pytest.mark.parametrize(("name", "params", "spec", "prediction", "path"), NETWORKS)
def test_a_stack_computes_what_the_loop_computes(
    name: str, params: dict[str, Any], spec: ConditionSpec, prediction: str, path: str
) -> None:
    ensemble, condition = three(name, params, spec, prediction, path), conditions(spec, 7)
    for expert in ensemble.experts:
        expert.double()
    if condition is not None and condition.values.is_floating_point():
        condition = Condition.of(condition.values.double())
    x_t = torch.randn(7, *SHAPE, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    t = torch.linspace(0.1, 0.98, 7, dtype=torch.float64)
    weights = torch.eye(3)[[0, 0, 0, 1, 0, 1, 0]] + 1e-3 * torch.eye(3)[[1, 1, 0, 1, 1, 1, 1]]  # expert 2 has no row

    def velocity() -> Tensor:
        return ensemble.velocity(x_t, t, condition, weights=weights, guidance_scale=2.0)

    one_by_one = velocity()
    ensemble.stack()
    assert torch.allclose(velocity(), one_by_one, rtol=1e-5, atol=1e-5) and one_by_one.abs().max() > 0.5
    ensemble.stack(False)
    assert torch.equal(velocity(), one_by_one)  # the experts themselves work as before


@pytest.mark.parametrize("strategy", ["full", "top-1", "bayes"])
def test_samples_depend_neither_on_stacking_nor_on_the_batch(strategy: str) -> None:
    ensemble, spec = three(*NETWORKS[0]), NETWORKS[0][2]
    solver = "ancestral" if strategy == "bayes" else "heun"

    def draw(*, stacked: bool, batch_size: int) -> Tensor:
        options: dict[str, Any] = {"num_steps": 6, "shift": 1.0, "seed": 0, "batch_size": batch_size}
        settings = SampleConfig(guidance_scale=2.0, guidance="mixture", stacked=stacked)
        return sample(
            ensemble, conditions(spec, 6), 6, SHAPE, strategy=strategy, solver=solver, settings=settings, **options
        )

    loop = draw(stacked=False, batch_size=6)
    assert torch.allclose(draw(stacked=True, batch_size=6), loop, atol=1e-4)
    assert torch.allclose(draw(stacked=True, batch_size=2), loop, atol=1e-4)


def test_the_stack_takes_no_memory_of_its_own() -> None:
    ensemble = three(*NETWORKS[0])
    ensemble.stack()
    for first, second in zip(ensemble.experts[0].parameters(), ensemble.experts[1].parameters(), strict=True):
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_other_architectures_are_refused() -> None:
    # Weights of 2 and of 4 heads have the same shapes.
    ensemble = three(*NETWORKS[0])
    ensemble.experts[2] = EXPERTS.build("dit", {**DIT, "num_heads": 4}, x_shape=SHAPE, condition=NETWORKS[0][2])
    with pytest.raises(UserError, match=r"expert-2 differs from expert-0 in its architecture.*set sample\.stacked=fal"):
        ensemble.stack()


def test_experts_are_not_compiled_and_stacked_at_once() -> None:
    settings = SampleConfig(stacked=True, compile=True)
    options: dict[str, Any] = {"num_steps": 2, "shift": 1.0, "seed": 0, "batch_size": 2}
    with pytest.raises(UserError, match=r"sample\.compile = true: does not go with sample\.stacked; remove one"):
        sample(three(*NETWORKS[0]), None, 2, SHAPE, strategy="full", settings=settings, **options)
