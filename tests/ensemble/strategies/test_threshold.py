"""``threshold`` by hand."""

from __future__ import annotations

import pytest
import torch

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES

ROWS = torch.tensor([[0.1, 0.6, 0.3], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]])


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.0, [[0.1, 0.6, 0.3], [0, 1, 0], [0.25, 0.25, 0.5]]),
        (0.25, [[0, 2 / 3, 1 / 3], [0, 1, 0], [0.25, 0.25, 0.5]]),
        (0.9, [[0, 1.0, 0], [0, 1, 0], [0, 0, 1]]),  # no expert has it: the most probable one
    ],
)
def test_every_expert_above_it(threshold: float, expected: list[list[float]]) -> None:
    weights = STRATEGIES.build("threshold", {"threshold": threshold}).weights(ROWS)
    assert torch.allclose(weights, torch.tensor(expected), atol=1e-6)


def test_it_is_a_probability() -> None:
    with pytest.raises(UserError, match="must be from 0 to 1"):
        STRATEGIES.build("threshold", {"threshold": 1.1})
