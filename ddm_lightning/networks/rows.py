"""Layers that answer a row with the same bits whatever the other rows are, on a CPU and in float32.

A matrix product sums in an order that depends on its number of rows: MKL has kernels of their own for few rows, and
several threads share the sum of many features. Both round differently, which later steps of a sampler amplify. The
limits below are those of MKL and torch 2.13 on Intel's AVX-512; on other processors rows may differ in the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_MIN_ROWS = 16
"""MKL, and on one thread torch's convolutions of 1 x 1, have other kernels for fewer rows."""
_FEW_NUMBERS = 20_480
"""Torch has another convolution for a single row of at most as many."""
_MAX_FEATURES = 768
"""Of more features, threads sum parts of their own, unless there are many rows."""


def _linear(
    x: Float[Tensor, "b *n features"], weight: Float[Tensor, "out features"], bias: Tensor | None = None
) -> Float[Tensor, "b *n out"]:
    num_features = x.shape[-1]
    num_rows = x.numel() // num_features
    shares_sums = num_features > _MAX_FEATURES and torch.get_num_threads() > 1
    if num_rows >= _MIN_ROWS and not shares_sums:
        return functional.linear(x, weight, bias)

    # Products of one size: the tokens of one sample, or as many vectors as are safe.
    size = max(_MIN_ROWS, num_rows // len(x))
    rows = functional.pad(x.flatten(0, -2), (0, 0, 0, -num_rows % size))
    parts = [functional.linear(part, weight, bias) for part in rows.split(size)]
    return torch.cat(parts)[:num_rows].unflatten(0, x.shape[:-1])


def _convolution(
    x: Float[Tensor, "b c h w"], weight: Float[Tensor, "out c2 kh kw"], *more: Any
) -> Float[Tensor, "b out h2 w2"]:
    num_rows = 1
    if x.numel() <= _FEW_NUMBERS:
        num_rows = 2
    if weight[0, 0].numel() == 1:
        num_rows = _MIN_ROWS

    missing = max(0, num_rows - len(x))
    return functional.conv2d(functional.pad(x, (*[0] * 7, missing)), weight, *more)[: len(x)]


class IndependentRows(TorchFunctionMode):
    """Make linear layers and convolutions independent of their number of rows while inside.

    It costs what products of 16 vectors cost: a quarter more time for one sample of a small network, 1 % for 64.
    Products of 16 rows or more keep the bits that they have outside, unless threads share their sums.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        steady = {functional.linear: _linear, functional.conv2d: _convolution}
        return steady.get(function, function)(*args, **(kwargs or {}))
