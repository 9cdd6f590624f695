"""Times of training and sampling on [0, 1]; t = 0 is data, t = 1 is noise."""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

# Far enough from both ends to survive float32 arithmetic such as 1 - t.
_MARGIN = 1e-6


def shift_timesteps(t: Float[Tensor, "*shape"], shift: float) -> Float[Tensor, "*shape"]:
    """``shift·t / (1 + (shift-1)·t)``: moves times towards noise for ``shift`` > 1 (SD3, 2403.03206, section 5.3.2).

    Adds ``log(shift)`` to logit(t); 0 and 1 stay fixed.
    """
    return shift * t / (1 + (shift - 1) * t)


def sample_timesteps(
    num: int,
    density: str,
    mean: float,
    std: float,
    shift: float,
    generator: torch.Generator,
    device: torch.device | str,
    interval: tuple[float, float] = (0.0, 1.0),
) -> Float[Tensor, " b"]:
    """``num`` random training times on ``device``, float32, strictly inside (0, 1).

    On an ``interval``, the density is that of [0, 1] divided by its mass there: the inverse of the cumulative density
    at uniform numbers of its part.

    Args:
        num: number of times.
        density: ``logit-normal`` (SD3, 2403.03206, section 3.1) or ``uniform``.
        mean: mean of logit(t) before the shift; ``uniform`` ignores it.
        std: std of logit(t); ``uniform`` ignores it.
        shift: see ``shift_timesteps``.
        generator: source of the times, on its own device: a CPU generator gives the same times on every machine.
        device: device of the result.
        interval: lowest and highest of the times returned, hence after the shift.
    """
    low, high = interval
    # On the CPU, so that nothing waits for the device; the inverse of a shift by s is one by 1/s.
    edges = torch.tensor(interval, dtype=torch.float64)
    edges = torch.where(edges == 1, edges, shift_timesteps(edges, 1 / shift))  # which may round
    if density == "uniform":
        first, last = edges.tolist()
        t = first + (last - first) * torch.rand(num, generator=generator, device=generator.device)
    elif interval == (0.0, 1.0):
        t = torch.sigmoid(mean + std * torch.randn(num, generator=generator, device=generator.device))
    else:
        ends = (edges.logit() - mean) / std
        # Far in the upper tail the cumulative density rounds to 1, so take the mirror image.
        sign = -1 if ends[0] > 0 else 1
        first, last = torch.special.log_ndtr(sign * ends).exp().tolist()  # ndtr loses the tail
        uniform = torch.rand(num, generator=generator, device=generator.device, dtype=torch.float64)
        normal = sign * torch.special.ndtri(first + (last - first) * uniform)
        t = torch.sigmoid(mean + std * normal)

    shifted = shift_timesteps(t, shift).clamp(max(low, _MARGIN), min(high, 1 - _MARGIN))
    return shifted.to(device, torch.float32)


def stratified_timesteps(num: int = 8) -> Float[Tensor, " b"]:
    """Midpoints of ``num`` equal parts of [0, 1], float32. Fixed times make validation losses comparable."""
    return (torch.arange(num, dtype=torch.float32) + 0.5) / num


def sampling_times(
    num_steps: int, shift: float = 1.0, dtype: torch.dtype = torch.float32
) -> Float[Tensor, " num_times"]:
    """``num_steps + 1`` times from exactly 1 (noise) down to exactly 0 (data), shifted as in training."""
    times = shift_timesteps(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift)
    times[0] = 1  # shift/(1 + (shift-1)) may round
    return times.to(dtype)


def intervals(times: Float[Tensor, " num_times"]) -> list[tuple[float, float]]:
    """The steps ``(t, s)`` between neighbouring ``times`` as Python floats, with a single device synchronisation."""
    return list(pairwise(times.tolist()))
