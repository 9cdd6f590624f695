"""Layers that answer a row with the same bits whatever the other rows are, on a CPU and in float32.

A matrix product sums in an order that depends on its number of rows: MKL has kernels of their own for few rows, and
several threads share the sum of many features. Both round differently, which later steps of a sampler amplify. The
limits below are those of MKL and torch 2.13 on Intel's AVX-512; on other processors rows may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

_MIN_ROWS = 16
"""MKL, and on one thread torch's convolutions of 1 x 1, have other kernels for fewer rows."""
_FEW_NUMBERS = 20_480
"""Torch has another convolution for a single row of at most as many."""
_MAX_FEATURES = 768
"""Of more features, threads sum parts of their own, unless there are many rows."""


class _Linear(nn.Linear):
    def forward(self, x: Float[Tensor, "b *n features"]) -> Float[Tensor, "b *n out"]:
        num_rows = x.numel() // self.in_features
        shares_sums = self.in_features > _MAX_FEATURES and torch.get_num_threads() > 1
        if num_rows >= _MIN_ROWS and not shares_sums:
            return super().forward(x)

        # Products of one size: the tokens of one sample, or as many vectors as are safe.
        size = max(_MIN_ROWS, num_rows // len(x))
        rows = functional.pad(x.flatten(0, -2), (0, 0, 0, -num_rows % size))
        parts = [functional.linear(part, self.weight, self.bias) for part in rows.split(size)]
        return torch.cat(parts)[:num_rows].unflatten(0, x.shape[:-1])


class _Convolution(nn.Conv2d):
    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b out h2 w2"]:
        num_rows = 1
        if x.numel() <= _FEW_NUMBERS:
            num_rows = 2
        if self.kernel_size == (1, 1) and torch.get_num_threads() == 1:
            num_rows = _MIN_ROWS

        missing = max(0, num_rows - len(x))
        return super().forward(functional.pad(x, (*[0] * 7, missing)))[: len(x)]


@contextmanager
def independent_rows(network: nn.Module) -> Iterator[None]:
    """Make the layers of a network independent of their number of rows while inside; its weights stay as they are.

    It costs what products of 16 vectors cost: a quarter more time for one sample of a small network, 1 % for 64.
    Products of 16 rows or more keep the bits that they have outside, unless threads share their sums.
    """
    steady: dict[type, type] = {nn.Linear: _Linear, nn.Conv2d: _Convolution}
    changed = [(part, type(part)) for part in network.modules() if type(part) in steady]
    try:
        for part, plain in changed:
            part.__class__ = steady[plain]
        yield
    finally:
        for part, plain in changed:
            part.__class__ = plain
