"""The image encoder that leaves pictures as they are: the experts model pixels."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8
from torch import Tensor

from ddm_lightning.prepare.registry import IMAGE_ENCODERS


@IMAGE_ENCODERS.register("pixels")
class Pixels:
    """Stores uint8 pixels, channels first; ``x_0`` runs from -1 to 1."""

    packages: tuple[str, ...] = ()
    dtype = "uint8"

    def __init__(self) -> None:
        self.normalisation = {"scale": 1 / 127.5, "shift": 127.5}

    def x_shape(self, image_size: int) -> tuple[int, int, int]:
        """Channels, height and width."""
        return (3, image_size, image_size)

    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> UInt8[np.ndarray, "n 3 h w"]:
        """Channels first."""
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    def decode(self, x_0: Float[Tensor, "n 3 h w"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Rounded to the nearest pixel value; values outside -1 to 1 are clamped."""
        stored = x_0.detach().float().cpu() / self.normalisation["scale"] + self.normalisation["shift"]
        return np.ascontiguousarray(stored.round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy())
