from functools import partial

import pytest

from ddm_lightning.core.registry import SOURCES
from ddm_lightning.testing import check_source


@pytest.fixture(scope="module")
def openmoji():
    return SOURCES.build("openmoji", {"image_size": 16})


@pytest.fixture(scope="module")
def by_caption(openmoji):
    return {record.caption: record for part in openmoji.parts() for record in openmoji.read(part)}


def test_it_keeps_the_contract_of_sources(by_caption):
    check_source(partial(SOURCES.build, "openmoji", {"image_size": 8}))
    assert {record.image.shape for record in by_caption.values()} == {(16, 16, 3)} and all(by_caption)


def test_openmoji_has_the_images_the_demo_asks_for(openmoji, by_caption):
    assert 1850 <= len(by_caption) <= 1950
    assert {
        "red apple",
        "flag: Japan",
        "flag: Scotland",
        "grinning face",
        "mechanic",
        "eight o'clock",
    } <= by_caption.keys()
    assert not any("skin tone" in caption or ":" in caption.removeprefix("flag:") for caption in by_caption)
    assert "CC BY-SA 4.0" in openmoji.attribution


def test_openmoji_images_show_what_they_say(by_caption):
    apple = by_caption["red apple"].image.astype(int)
    red, green, blue = apple[4:12, 4:12].mean((0, 1))
    assert red > green + 60 and red > blue + 60
    face = by_caption["grinning face"].image.astype(int)
    assert face[:, :, 0].mean() > face[:, :, 2].mean() + 40, "yellow"
    japan = by_caption["flag: Japan"].image.astype(int)
    assert japan[8, 8, 0] > japan[8, 8, 1] + 80, "a red disc in the middle"
    assert (japan[0] > 240).all(), "the flag is centred on white"


def test_a_trimmed_emoji_keeps_its_own_proportions(by_caption):
    source = SOURCES.build("openmoji", {"image_size": 32, "trim": True})
    trimmed = {record.caption: record.image for part in source.parts() for record in source.read(part)}
    assert trimmed.keys() == by_caption.keys()
    for image in trimmed.values():
        height, width, _ = image.shape
        assert max(height, width) == 32 and min(height, width) >= 16

    wide = trimmed["flag: Japan"]
    assert 18 <= len(wide) <= 22 and (wide[:2] < 128).any(), "the flag's frame is at the edge"
    assert trimmed["grinning face"].shape == (32, 32, 3)
    assert trimmed["man standing"].shape[1] < 20
    # A minus sign is four times as wide as high; white fills it up to 2:1.
    assert trimmed["minus"].shape == (16, 32, 3) and (trimmed["minus"][[0, -1]] > 250).all()
