"""Turns opened images of any mode into RGB pixels: images to train on, and images to start a sample from."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from ddm_lightning.core.errors import UserError


def rgb(image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
    """Convert an image: upright, on white where it is transparent.

    Grey of more than 8 bits is scaled to 8: from 12 bits if no value is larger, else from 16. CMYK is converted by
    Pillow's formula. Colour profiles are not applied.

    Args:
        image: is turned in place, if its Exif data says so.

    Raises:
        UserError: its pixels have no defined colours.
    """
    image.load()
    with suppress(Exception):  # damaged Exif data is no reason to lose an image
        ImageOps.exif_transpose(image, in_place=True)

    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow would clip. Some of its versions open 16-bit files as mode I.
        grey = np.asarray(image).astype(np.float64)
        white = 65535
        if grey.max() <= 4095:
            white = 4095

        grey = np.clip(grey * (255 / white), 0, 255)
        image = Image.fromarray(np.rint(grey).astype(np.uint8))

    if image.mode == "F":
        raise UserError("an image has floating-point numbers of unknown range; convert it to RGB")
    if image.palette is not None and not image.palette.palette:  # Streaming's encoding ``pil`` loses it
        raise UserError("an image has numbers of a palette that was not stored; convert it to RGB")
    if image.mode == "La":  # Pillow converts it to nothing else
        image = image.convert("LA")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))

    if image.mode != "RGB":
        image = image.convert("RGB")

    return np.asarray(image)
