"""Modules whose weights are no zeros, in float64 or as they are."""

from typing import TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module):
    """Every parameter drawn anew, in float64."""
    module.double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * random(*parameter.shape, seed=100 + seed)
    return module


def moved(module):
    """A module that has left its zeros."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module
