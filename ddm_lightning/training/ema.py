"""Exponential moving average of the weights, kept in the optimizer's state.

There it needs no code of its own to be saved, resumed or resharded, and a sharded parameter averages
its local shard without communication.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddm_lightning.core.devices import local

KEY = "ema"
STEPS = "ema_steps"


def width_key(width: float) -> str:
    """Under which the power-function average of a width is kept."""
    return f"{KEY}_{width:g}"


def track_ema(optimizer: Optimizer, decay: float, widths: Sequence[float] = ()) -> None:
    """Average every parameter after each step of ``optimizer``, under ``KEY`` and each ``width_key``.

    The first average is the weights after the first step.

    Args:
        optimizer: in whose state the averages are kept.
        decay: of the exponential average. It warms up as ``min(decay, (1 + n) / (10 + n))`` over steps n, so that the
            first thousand steps are not dominated by the initial weights.
        widths: of power-function averages (``ema_profiles``).
    """
    exponents = {width_key(width): exponent_of(width) for width in widths}
    for group in optimizer.param_groups:
        group.setdefault(STEPS, 0)

    # Local shards by group and key: asking a DTensor for its shard at each step costs the host more than the average.
    kept: dict[tuple[int, str], tuple[list[Tensor], list[Tensor]]] = {}

    @torch.no_grad()
    def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for number, group in enumerate(optimizer.param_groups):
            steps = group[STEPS]
            shares = {KEY: min(decay, (1 + steps) / (10 + steps))}
            shares |= {key: power_decay(exponent, steps + 1) for key, exponent in exponents.items()}
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for key, share in shares.items():
                states = [optimizer.state[parameter] for parameter in parameters]
                for parameter, state in zip(parameters, states, strict=True):
                    if key not in state:
                        # A clone keeps the parameter's own (perhaps uneven) sharding.
                        state[key] = parameter.detach().clone()
                tensors = [*parameters, *(state[key] for state in states)]
                known, shards = kept.get((number, key), ([], []))
                if len(known) != len(tensors) or not all(map(operator.is_, known, tensors)):  # a checkpoint was loaded
                    shards = [local(tensor) for tensor in tensors]
                    kept[number, key] = tensors, shards
                if shards:
                    torch._foreach_lerp_(shards[len(parameters) :], shards[: len(parameters)], 1.0 - share)
            group[STEPS] = steps + 1

    optimizer.register_step_post_hook(after_step)


def ema_tensors(module: nn.Module, optimizer: Optimizer, key: str = KEY) -> dict[str, Tensor]:
    """The averages by parameter name, sharded as the parameters are; a parameter never stepped is itself.

    A parameter of two names (tied weights) is there by both, as in ``state_dict``.
    """
    return {
        name: optimizer.state.get(parameter, {}).get(key, parameter.detach())
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def gathered_ema(module: nn.Module, optimizer: Optimizer, key: str = KEY, *, keeps: bool = True) -> dict[str, Tensor]:
    """The whole averages on the CPU, fp32; a collective: every rank calls it.

    Args:
        module: the network.
        optimizer: its optimizer.
        key: which averages.
        keeps: whether this rank wants them; one that only takes part gets nothing.
    """
    gathered: dict[str, Tensor] = {}
    for name, value in ema_tensors(module, optimizer, key).items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if keeps:
            gathered[name] = whole.detach().float().cpu().clone()
    return gathered


def kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """What ``state_dict`` has besides parameters, such as a batch norm's statistics, as it is now, on the CPU."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items() if name not in parameters}


def _reshard(module: nn.Module) -> None:
    """Shard again what a forward pass without a backward pass left gathered, in plain tensors (FSDP2)."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def ema_weights(module: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Within the block ``module`` carries its averaged weights; afterwards its own, bit for bit."""
    _reshard(module)
    averages = ema_tensors(module, optimizer)
    own = {name: local(parameter.detach()).clone() for name, parameter in module.named_parameters()}

    def load(values: dict[str, Tensor]) -> None:
        _reshard(module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                local(parameter.detach()).copy_(local(values[name]))

    load(averages)
    try:
        yield
    finally:
        load(own)


WIDEST = 12**-0.5
"""Of exponent 0, which weighs all steps alike."""


def exponent_of(width: float) -> float:
    """The exponent γ of a profile whose width is ``width``, in (0, ``WIDEST``].

    Its variance is (γ + 1) / ((γ + 2)² (γ + 3)) of t², which falls with γ.
    """
    if not 0 < width <= WIDEST * (1 + 1e-9):
        raise ValueError(f"a width is above 0 and at most {WIDEST:.4f}, not {width}")
    inverse = width**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return max(0.0, float(roots[np.isreal(roots)].real.max()))


def width_of(exponent: float) -> float:
    """The width of a profile (inverse of ``exponent_of``)."""
    return float(((exponent + 1) / ((exponent + 2) ** 2 * (exponent + 3))) ** 0.5)


def power_decay(exponent: float, step: int) -> float:
    """What an average keeps of itself at ``step``, counted from 1: (1 − 1/t)^(γ + 1)."""
    return float((1.0 - 1.0 / step) ** (exponent + 1.0))


@dataclass(frozen=True)
class Snapshot:
    """One average at one step."""

    width: float
    step: int


@dataclass(frozen=True)
class Mixture:
    """How snapshots make an average of another width."""

    shares: Float[np.ndarray, " n"]
    """Of each snapshot, in float64; they sum to 1, and some are negative."""
    misfit: float
    """Norm of what the mixture's profile differs by from the wanted one, over the norm of that."""


def mixture(snapshots: Sequence[Snapshot], width: float, step: int) -> Mixture:
    """The mixture of snapshots nearest to the average of another ``width`` at ``step``, in least squares of profiles.

    The profiles' inner products are those of functions of continuous time.
    """
    exponents = np.array([exponent_of(snapshot.width) for snapshot in snapshots])
    steps = np.array([snapshot.step for snapshot in snapshots], dtype=np.float64)
    wanted, last = np.array(exponent_of(width)), np.array(float(step))
    products = _products(exponents[:, None], steps[:, None], exponents[None], steps[None])
    aims = _products(exponents, steps, wanted, last)
    # Neighbouring profiles are nearly the same: with ones in the diagonal fewest digits are lost.
    scale = np.sqrt(np.diagonal(products))
    # The shares have to sum to 1 (a Lagrange multiplier), or weights would be multiplied by their sum.
    border = scale.min() / scale
    system = np.block([[products / np.outer(scale, scale), border[:, None]], [border[None], np.zeros((1, 1))]])
    solved = np.linalg.lstsq(system, np.append(aims / scale, scale.min()), rcond=1e-14)[0][:-1] / scale
    whole = float(_products(wanted, last, wanted, last))
    rest = whole - 2 * solved @ aims + solved @ products @ solved
    return Mixture(solved, float(np.sqrt(max(0.0, rest) / whole)))


def _products(
    a: Float[np.ndarray, "*n"],
    step_a: Float[np.ndarray, "*n"],
    b: Float[np.ndarray, "*n"],
    step_b: Float[np.ndarray, "*n"],
) -> Float[np.ndarray, "*m"]:
    """∫ p_a p_b over the time before both steps, of p(τ) = (γ + 1) τ^γ / t^(γ + 1)."""
    earlier = np.minimum(step_a, step_b)
    # Powers of ratios below one: powers of steps overflow.
    overlap = (earlier / step_a) ** a * (earlier / step_b) ** b * earlier / (step_a * step_b)
    return (a + 1) * (b + 1) / (a + b + 1) * overlap
