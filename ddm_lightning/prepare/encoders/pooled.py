"""Features that need no weights: the picture averaged to a coarse grid."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, UInt8

from ddm_lightning.prepare.registry import FEATURES


@FEATURES.register("pooled-pixels")
class PooledPixels:
    """Mean colours on a ``grid`` × ``grid`` raster, from 0 to 1; for tests and synthetic data."""

    packages: tuple[str, ...] = ()

    def __init__(self, grid: int = 4) -> None:
        if grid < 1:
            raise ValueError("grid must be at least 1")
        self.grid = grid
        self.size = 3 * grid * grid

    def provenance(self) -> dict[str, str]:
        """Nothing: there are no weights."""
        return {}

    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Pictures to mean colours."""
        pixels = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).float() / 255
        return torch.nn.functional.adaptive_avg_pool2d(pixels, self.grid).flatten(1).numpy()
