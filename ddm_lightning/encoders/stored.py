"""The form in which shards store encoded images."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


class StoredForm:
    """How ``x_0`` is stored: as itself or as a Gaussian to sample from, and in which units.

    ``x_0 = (stored - shift) * scale`` in float32. A ``posterior`` holds means, then standard deviations, in twice the
    channels, as returned by a variational autoencoder (Kingma and Welling, arXiv 1312.6114).

    Args:
        stores: ``x_0`` or ``posterior``.
        normalisation: ``scale`` and ``shift``, one number each or one per channel.
    """

    def __init__(self, stores: str, normalisation: Mapping[str, float | list[float]]) -> None:
        self.stores = stores
        self._scale, self._shift = (
            torch.tensor(normalisation[name], dtype=torch.float64).reshape(-1, 1, 1) for name in ("scale", "shift")
        )
        # Cached by device and type: a new tensor at each step would synchronise with the device.
        self._placed: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def mean(self, stored: Shaped[Tensor, "b s h w"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "b c h w"]:
        """Return ``x_0`` or its mean."""
        scale, shift = self._units(stored.device, dtype)
        if self.stores == "posterior":
            stored = stored[:, : stored.shape[1] // 2]
        return (stored.to(dtype) - shift) * scale

    def std(
        self, stored: Shaped[Tensor, "b s h w"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "b c h w"] | None:
        """Return the standard deviation of ``x_0``; None if ``x_0`` itself is stored."""
        if self.stores != "posterior":
            return None
        scale, _ = self._units(stored.device, dtype)
        return stored[:, stored.shape[1] // 2 :].to(dtype) * scale.abs()

    def sample(self, stored: Shaped[Tensor, "b s h w"], generator: torch.Generator) -> Float[Tensor, "b c h w"]:
        """Sample ``x_0`` from its Gaussian; return a stored ``x_0`` unchanged."""
        mean, std = self.mean(stored), self.std(stored)
        if std is None:
            return mean
        return mean + std * torch.randn(mean.shape, generator=generator, device=mean.device)

    def _units(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        place = (device, dtype)
        if place not in self._placed:
            self._placed[place] = (self._scale.to(device, dtype), self._shift.to(device, dtype))
        return self._placed[place]
