"""Record the sampling trajectory: the experts' weights, and what the images look like, at the start of each step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import Samples, Times, x_0_from_velocity

Key: TypeAlias = tuple[int | str, ...]
"""Key of a sample's noise, such as ``("red apple", 0)``."""


class Trace:
    """The sampling trajectory of some samples, by their keys; give it to ``routing.sample``. It is on the CPU.

    Evaluations stay on the device until a batch is finished, so that no step waits for them. A strategy that mixes the
    experts on its own and does not call ``Batch.record`` leaves the trace empty.

    Args:
        keys: samples whose weights are kept; None for all.
        images: samples of which x_t and x_0 are kept, too.
    """

    def __init__(self, keys: Collection[Key] | None = None, images: Collection[Key] = ()) -> None:
        self._keys, self._images = keys, images
        self.times: Float[Tensor, " num_times"] = torch.empty(0)
        """Decreasing times of the steps; the last one is 0."""
        self.weights: dict[Key, Float[Tensor, "steps K"]] = {}
        """Weights of the experts at the start of each step."""
        self.x_t: dict[Key, Float[Tensor, "num_times c h w"]] = {}
        """The sample at each time, from noise to the end."""
        self.x_0: dict[Key, Float[Tensor, "num_times c h w"]] = {}
        """Its estimate of x_0 at each time, ``x_t - t·velocity``."""

    def begin(self, keys: Sequence[Key], device: torch.device) -> None:
        """Begin a batch of the samples ``keys``."""
        self._batch, self._evaluations = keys, list[tuple[Tensor, ...]]()
        shown = [row for row, key in enumerate(keys) if key in self._images]
        self._rows = torch.tensor(shown, dtype=torch.long, device=device)

    def add(self, x_t: Samples, t: Times, weights: Float[Tensor, "b K"], velocity: Samples) -> None:
        """Keep one evaluation of the batch."""
        x_t, velocity = x_t[self._rows], velocity[self._rows]
        self._evaluations.append((t, weights, x_t, x_0_from_velocity(x_t, velocity, t[self._rows])))

    def end(self, times: Float[Tensor, " num_times"], x_0: Float[Tensor, "b c h w"]) -> None:
        """Find the evaluation at each of ``times``; that at the last one is the finished ``x_0``."""
        if not self._evaluations:
            return
        t, weights, x_t, estimates = (torch.stack(parts) for parts in zip(*self._evaluations, strict=True))
        # Solvers also evaluate between steps, and some choose their own steps. Take the closest; of equals, the last.
        distances = (t.flip(0) - times[:-1, None, None].to(t)).abs()
        nearest = len(t) - 1 - distances.argmin(1)
        weights = weights[nearest, torch.arange(len(self._batch), device=t.device)].float().cpu()
        steps, columns = nearest[:, self._rows], torch.arange(len(self._rows), device=t.device)
        x_t, estimates = (part[steps, columns].float().cpu() for part in (x_t, estimates))
        self.times = times.cpu()
        for row, key in enumerate(self._batch):
            if self._keys is None or key in self._keys:
                self.weights[key] = weights[:, row]
        for column, row in enumerate(self._rows.tolist()):
            key, last = self._batch[row], x_0[row, None].float()
            self.x_t[key] = torch.cat([x_t[:, column], last])
            self.x_0[key] = torch.cat([estimates[:, column], last])
