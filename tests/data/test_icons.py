import json

import numpy as np
import pytest

from ddm_data.icons import concept
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import BrokenSample
from ddm_lightning.testing import check_source

SQUARE = '<path fill="#f00" d="M0 0h4v4H0z"/>'
RED_APPLE = {"body": SQUARE}


def about(name, spdx="MIT", category="Emoji", palette=True):
    credit = {"author": {"name": "A. Uthor"}, "license": {"spdx": spdx}}
    return {"name": name, "category": category, "palette": palette, **credit}


@pytest.fixture
def package(tmp_path):
    collections = {
        "free": about("Free Icons", "CC-BY-4.0"),
        "other": about("Other Icons", category="UI Multicolor"),
        "share-alike": about("Shared", "CC-BY-SA-4.0"),
        "one-colour": about("Plain", palette=False),
        "brands": about("Brands", category="Logos"),
    }
    icons = {
        "red-apple": RED_APPLE,
        "wide-box": {"body": '<path fill="#00f" d="M0 0h8v4H0z"/>', "width": 8},
        "offset": {"body": '<path fill="#0a0" d="M2 2h4v4H2z"/>', "left": 2, "top": 2},
        "waving-hand-light-skin-tone": RED_APPLE,
        "artist-medium-dark": RED_APPLE,
        "old": {"body": SQUARE, "hidden": True},
        "twitter": RED_APPLE,
        "wolf": RED_APPLE,
        "nothing": {"body": ""},
        "damaged": {"body": "<path"},
    }
    folder = tmp_path / "iconify"
    (folder / "json").mkdir(parents=True)
    (folder / "package.json").write_text('{"version": "1.2.3"}')
    (folder / "collections.json").write_text(json.dumps(collections))
    free = {"icons": icons, "width": 4, "height": 4, "categories": {"Brand": ["wolf"], "Food": ["red-apple"]}}
    other = {"icons": {"red-apple-2-flat": RED_APPLE}, "width": 4, "height": 4}
    for name, content in {"free": free, "other": other, "one-colour": other}.items():
        (folder / "json" / f"{name}.json").write_text(json.dumps(content))
    return folder


def found_in(package, **params):
    source = SOURCES.build("icons", {"path": str(package), "size": 16, **params})
    return {one.key: one for part in source.parts() for one in source.read(part)}


def test_free_colourful_icons_without_trademarks_and_skin_tones_are_taken(package):
    check_source(lambda: SOURCES.build("icons", {"path": str(package), "size": 16}))
    found = found_in(package)
    usable = {key for key, one in found.items() if not isinstance(one, BrokenSample)}
    assert usable == {"free/red-apple", "free/wide-box", "free/offset", "other/red-apple-2-flat"}
    assert {key: one.cause for key, one in found.items() if isinstance(one, BrokenSample)} == {
        "free/nothing": "blank image",
        "free/damaged": "damaged image",
    }
    credit = SOURCES.build("icons", {"path": str(package)}).attribution
    assert credit == "Icons: Free Icons by A. Uthor (CC-BY-4.0), Other Icons by A. Uthor (MIT)"


def test_icons_fill_a_white_square_whatever_their_view_box(package):
    found = found_in(package)
    assert (found["free/red-apple"].image == [255, 0, 0]).all()
    assert (found["free/offset"].image == [0, 170, 0]).all()
    expected = np.full((16, 16, 3), 255)
    expected[4:12] = [0, 0, 255]
    np.testing.assert_array_equal(found["free/wide-box"].image, expected)

    # One concept has one caption and one group in all sets.
    for key in ("free/red-apple", "other/red-apple-2-flat"):
        assert (found[key].caption, found[key].group) == ("red apple", "redapple")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("flag-for-flag-japan", "japan"),
        ("flag-japan", "japan"),
        ("alarmclock", "alarmclock"),
        ("alarm-clock", "alarmclock"),
        ("people-48", "people"),
        ("flag", "flag"),
        ("100", "100"),
    ],
)
def test_concepts_ignore_spelling_size_and_style(name, expected):
    assert concept(name) == expected


def test_sets_and_licences_can_be_chosen(package):
    assert found_in(package, sets=["other"]).keys() == {"other/red-apple-2-flat"}
    assert found_in(package, sets=["one-colour"]).keys() == {"one-colour/red-apple-2-flat"}
    assert found_in(package, licenses=["MIT"]).keys() == {"other/red-apple-2-flat"}
    with pytest.raises(UserError, match="'brands' is unknown or does not pass the filter; known: free, other"):
        found_in(package, sets=["brands"])


def test_a_missing_package_names_the_commands_that_fetch_it(tmp_path):
    with pytest.raises(UserError, match=r"npm pack @iconify/json && mkdir -p .*missing && tar -xzf") as refusal:
        SOURCES.build("icons", {"path": str(tmp_path / "missing")})
    assert "\n" not in str(refusal.value)


def test_emoji_with_skin_tones_share_groups_with_their_base_and_with_icons():
    source = SOURCES.build("openmoji", {"image_size": 8, "skin_tones": True})
    by_caption = {one.caption: one for part in source.parts() for one in source.read(part)}
    assert len(by_caption) > 3500
    hands = {one.group for caption, one in by_caption.items() if caption.startswith("waving hand")}
    assert hands == {concept("waving-hand")}
    assert by_caption["flag: Japan"].group == concept("flag-for-flag-japan")
