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


def linear(x, layer):
    return x @ layer.weight.T + layer.bias


def attend(q, k, v):
    """Softmax attention of heads, [b n h d], by its formula; the heads of a token one behind the other."""
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v).flatten(2)


def standardised(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()


def mean_square(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def rms(heads, norm):
    """Queries or keys after their norm, or as they are without one."""
    if isinstance(norm, nn.Identity):
        return heads

    return mean_square(heads) * norm.weight


def mlp(x, layers):
    """Two linear layers with a GELU in between."""
    hidden = linear(x, layers[0])
    return linear(hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5)), layers[2])


def check_mixed_precision(network, condition):
    """It answers in the type of x_t: under autocast, and with weights in bfloat16 as sharding may have them."""
    given = (torch.randn(2, 3, 8, 8), torch.rand(2), condition)
    exact = network(*given)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(*given)

    narrow = network.bfloat16()(*given)

    assert mixed.dtype == narrow.dtype == torch.float32
    assert 0 < (mixed - exact).norm() / exact.norm() < 0.05
    assert (narrow - exact).norm() / exact.norm() < 0.1


def moved(module):
    """A module that has left its zeros."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))

    return module
