"""Pictures of any size to the squares that encoders and feature networks see."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8
from PIL import Image

ASPECTS = ("crop", "pad", "stretch")


def to_square(image: UInt8[np.ndarray, "h w 3"], size: int, aspect: str) -> UInt8[np.ndarray, "size size 3"]:
    """The picture at ``size`` × ``size`` pixels (Lanczos).

    Args:
        image: RGB.
        size: height and width of the result.
        aspect: ``crop`` keeps the middle of the longer side, as ADM and DiT do; ``pad`` keeps the whole picture, on
            white; ``stretch`` keeps the whole picture and changes its proportions.

    Raises:
        ValueError: unknown ``aspect``.
    """
    if aspect not in ASPECTS:
        raise ValueError(f"aspect {aspect!r} is none of {', '.join(ASPECTS)}")
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    picture = Image.fromarray(image)
    if aspect == "crop":
        side = min(height, width)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
        return np.asarray(picture.resize((size, size), Image.Resampling.LANCZOS, box=box))
    if aspect == "stretch":
        return np.asarray(picture.resize((size, size), Image.Resampling.LANCZOS))
    longer = max(height, width)
    inner = (max(1, round(width * size / longer)), max(1, round(height * size / longer)))
    sheet = Image.new("RGB", (size, size), "white")
    sheet.paste(picture.resize(inner, Image.Resampling.LANCZOS), ((size - inner[0]) // 2, (size - inner[1]) // 2))
    return np.asarray(sheet)
