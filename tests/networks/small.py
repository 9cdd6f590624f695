"""Modules whose weights are no zeros, in float64 or as they are."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: Module) -> Module:
    """Every parameter drawn anew, in float64."""
    module.double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * random(*parameter.shape, seed=100 + seed)
    return module


def moved(module: Module) -> Module:
    """A module that has left its zeros."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module
