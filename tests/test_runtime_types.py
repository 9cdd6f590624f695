"""Shapes are really checked when tests run; otherwise the other tests check less than they seem to."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

from ddm_lightning.ensemble.strategies.routed import Full
from ddm_lightning.flow.path import interpolate
from ddm_lightning.networks.attention import attention


def call_with_wrong_shapes(name: str) -> object:
    if name == "flow":
        return interpolate(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    if name == "networks":
        return attention(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), "sdpa")
    return Full().weights(torch.full((2, 2, 2), 0.5))


@pytest.mark.parametrize("name", ["flow", "networks", "ensemble"])
def test_a_wrong_shape_is_caught_at_the_call(name: str) -> None:
    with pytest.raises(TypeCheckError):
        call_with_wrong_shapes(name)


@pytest.mark.usefixtures("unchecked_types")
def test_a_test_can_ask_what_the_code_itself_makes_of_it() -> None:
    assert call_with_wrong_shapes("flow") is not None


def test_an_int_is_a_float_where_pep_484_says_so() -> None:
    from runtime_types import check_types

    def half(number: float) -> float:
        return number / 2

    assert check_types(half)(3) == 1.5
