"""``top-p`` by hand."""

from __future__ import annotations

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
def test_the_fewest_experts_that_reach_p(p: float, expected: list[list[float]]) -> None:
    assert torch.allclose(
        STRATEGIES.build("top-p", {"p": p}).weights(ROWS), torch.tensor(expected, dtype=torch.float32), atol=1e-6
    )


@pytest.mark.parametrize("p", [0.0, 1.5])
def test_p_is_a_share(p: float) -> None:
    with pytest.raises(UserError, match="must be above 0 and at most 1"):
        STRATEGIES.build("top-p", {"p": p})
