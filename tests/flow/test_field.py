from __future__ import annotations

import pytest
import torch

from ddm_lightning.flow.path import time_rows


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_time_is_repeated_a_row_and_never_narrower_than_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    rows = time_rows(0.937, torch.zeros(3, 2, dtype=dtype))
    assert rows.dtype == expected
    assert rows.tolist() == pytest.approx([0.937] * 3, abs=1e-7)
