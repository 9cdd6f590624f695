"""From what the shards store to ``x_0``, the tensor that the networks model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

STORED_FORMS = ("x_0", "posterior")


class StoredForm:
    """How ``x_0`` is stored: as itself, or as the Gaussian from which it is drawn; and in which units.

    ``x_0 = (stored - shift) * scale`` in float32. A ``posterior`` holds means, then standard deviations, in twice the
    channels, as a variational autoencoder gives them (Kingma and Welling, arXiv 1312.6114).

    Args:
        stores: ``x_0`` or ``posterior``.
        normalisation: ``scale`` and ``shift``, a number each or one a channel.

    Raises:
        ValueError: another ``stores``.
    """

    def __init__(self, stores: str, normalisation: Mapping[str, float | list[float]]) -> None:
        if stores not in STORED_FORMS:
            raise ValueError(f"stored as {stores!r}, which is none of {', '.join(STORED_FORMS)}")
        self.stores = stores
        self._scale, self._shift = (
            torch.tensor(normalisation[name], dtype=torch.float64).reshape(-1, 1, 1) for name in ("scale", "shift")
        )
        # Made once a device and type: to make them at each step would wait for the device.
        self._placed: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def mean(
        self, stored: Shaped[Tensor, "b stored_c h w"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "b c h w"]:
        """``x_0``, or its mean."""
        scale, shift = self._units(stored.device, dtype)
        if self.stores == "posterior":
            stored = stored[:, : stored.shape[1] // 2]
        return (stored.to(dtype) - shift) * scale

    def spread(
        self, stored: Shaped[Tensor, "b stored_c h w"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "b c h w"] | None:
        """The standard deviation of ``x_0``; None where there is none."""
        if self.stores != "posterior":
            return None
        return stored[:, stored.shape[1] // 2 :].to(dtype) * self._units(stored.device, dtype)[0].abs()

    def draw(self, stored: Shaped[Tensor, "b stored_c h w"], generator: torch.Generator) -> Float[Tensor, "b c h w"]:
        """``x_0``, drawn from its Gaussian where that is stored; nothing is drawn otherwise."""
        mean, spread = self.mean(stored), self.spread(stored)
        if spread is None:
            return mean
        return mean + spread * torch.randn(mean.shape, generator=generator, device=mean.device)

    def _units(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        place = (device, dtype)
        if place not in self._placed:
            self._placed[place] = (self._scale.to(device, dtype), self._shift.to(device, dtype))
        return self._placed[place]
