"""``top-p`` and ``threshold`` by hand."""

import pytest
import torch

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES

ROWS = torch.tensor([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]])


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


def test_the_threshold_is_a_probability():
    with pytest.raises(UserError, match="must be from 0 to 1"):
        STRATEGIES.build("threshold", {"threshold": 1.1})
