"""The image encoder that keeps pixels: the experts model the images themselves, perhaps at a smaller size."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ddm_lightning.core.registry import FEATURES, IMAGE_ENCODERS

_SCALE, _SHIFT = 1 / 127.5, 127.5


@IMAGE_ENCODERS.register("pixels")
class Pixels:
    """Stores uint8 pixels, channels first; ``x_0`` runs from -1 to 1.

    Args:
        image_size: height and width to which images are scaled (Lanczos); None keeps theirs. The feature network always
            sees the full-size images, so a small model need not mean poor clusters.

    Raises:
        ValueError: an ``image_size`` below 1.
    """

    packages: tuple[str, ...] = ()
    dtype = "uint8"
    stores = "x_0"

    def __init__(self, image_size: int | None = None) -> None:
        if image_size is not None and image_size < 1:
            raise ValueError(f"image_size = {image_size} must be at least 1")
        self.image_size = image_size
        self.normalisation: dict[str, float | list[float]] = {"scale": _SCALE, "shift": _SHIFT}

    def provenance(self) -> dict[str, str]:
        """Return nothing: there are no weights."""
        return {}

    def x_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return channels, height and width."""
        size = self.image_size or image_size
        return (3, size, size)

    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> UInt8[np.ndarray, "n 3 h w"]:
        """Scale images and move the channels first."""
        if self.image_size is not None and images.shape[1:3] != (self.image_size, self.image_size):
            images = np.stack([self._scaled(image) for image in images])
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    def _scaled(self, image: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "height width 3"]:
        assert self.image_size is not None
        return np.asarray(Image.fromarray(image).resize((self.image_size, self.image_size), Image.Resampling.LANCZOS))

    def decode(self, x_0: Float[Tensor, "n 3 h w"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Decode to images, rounded to the nearest pixel value; values outside -1 to 1 are clamped."""
        stored = x_0.detach().float().cpu() / _SCALE + _SHIFT
        return np.ascontiguousarray(stored.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy())


@FEATURES.register("pooled-pixels")
class PooledPixels:
    """Mean colours on a ``grid`` × ``grid`` grid, from 0 to 1; for tests and synthetic data."""

    packages: tuple[str, ...] = ()

    def __init__(self, grid: int = 4) -> None:
        if grid < 1:
            raise ValueError("grid must be at least 1")
        self.grid = grid
        self.size = 3 * grid * grid

    def provenance(self) -> dict[str, str]:
        """Return nothing: there are no weights."""
        return {}

    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Encode images to mean colours."""
        pixels = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).float() / 255
        return torch.nn.functional.adaptive_avg_pool2d(pixels, self.grid).flatten(1).numpy()
