"""Experts that return NaN or an infinity, at once or late; ``test_changed_experts.py`` has whole ensembles on disk."""

import math

import pytest
import torch
from ensemble_networks import Aimed, FixedRouter
from torch import nn
from toy_ensemble import sample

from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition

SHAPE = (1, 2, 2)


class Breaks(nn.Module):
    """Returns ``number`` in one pixel of the rows whose condition is 1, from a time on."""

    prediction = "velocity"

    def __init__(self, number, time):
        super().__init__()
        self.number = number
        self.time = time

    def forward(self, x_t, t, condition):
        found = x_t.clone()
        found[(t <= self.time) & (condition.values[:, 0] == 1), 0, 0, 1] = self.number
        return found


def generate(experts, **way):
    ensemble = Ensemble(experts, FixedRouter([0.0] * len(experts)), [1 / len(experts)] * len(experts))
    condition = Condition.of(torch.tensor([[0.5], [1.0], [0.0]]))
    options = {"strategy": "full", "num_steps": 4, "shift": 1.0, "seed": 1, "batch_size": 3, **way}
    return sample(ensemble, condition, 3, SHAPE, **options), ensemble


BAYES = {"strategy": "bayes", "solver": "ancestral"}  # drops an expert that returns an infinity as an unlikely one


@pytest.mark.parametrize(
    ("way", "number"), [({}, math.nan), ({}, math.inf), ({}, -math.inf), (BAYES, math.nan)], ids=str
)
@pytest.mark.parametrize("time", [1.0, 0.5])
def test_an_expert_that_breaks_is_left_out_of_its_rows(way, number, time):
    """Those rows become what the other expert alone makes of the same noise."""
    found, ensemble = generate([Aimed(), Breaks(number, time)], **way)
    alone = generate([Aimed()], **way)[0]
    both = generate([Aimed(), Breaks(number, -1.0)], **way)[0]
    assert ensemble.failed == {1}
    assert torch.allclose(found[1], alone[1], atol=1e-6)
    assert torch.allclose(found[[0, 2]], both[[0, 2]], atol=1e-6)


def test_if_all_experts_break_the_last_one_is_named():
    with pytest.raises(
        UserError, match=r"expert-[01]: returns NaN, and the strategy has no other expert; fit it again"
    ):
        generate([Breaks(math.nan, 1.0), Breaks(math.inf, 1.0)])
