import numpy as np
import pytest

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES


def photos(**params):
    source = SOURCES.build("photos", params)
    return source, [one for part in source.parts() for one in source.read(part)]


@pytest.fixture(scope="module")
def patches():
    return photos(max_side=512)


def corner(patch):
    _, y, x = patch.key.rsplit("-", 2)
    return int(y), int(x)


def test_patches_show_their_photograph(patches):
    from sklearn.datasets import load_sample_image

    source, found = patches
    assert len({one.key for one in found}) == len(found) > 4000
    assert {one.label for one in found} == set(range(source.num_classes))
    assert all(one.caption == source.class_names[one.label] and one.image.std() >= 8 for one in found)
    _, whole = photos(max_side=2000, stride=64)
    china = [one for one in whole if one.caption == "Chinese palace"]
    y, x = corner(china[5])
    np.testing.assert_array_equal(china[5].image, load_sample_image("china.jpg")[y : y + 48, x : x + 48])


def test_no_pixel_is_in_two_groups(patches):
    groups = sorted({patch.group for patch in patches[1]})
    numbers = {group: number for number, group in enumerate(groups)}
    owners = np.full((patches[0].num_classes, 512, 512), -1)
    for patch in patches[1]:
        y, x = corner(patch)
        own = owners[patch.label, y : y + 48, x : x + 48]
        assert ((own == -1) | (own == numbers[patch.group])).all()
        own[:] = numbers[patch.group]
    assert len(groups) > 100 and all(group.count(",") == 1 for group in groups)


def test_patches_may_be_of_another_shape(patches):
    from skimage import data

    _, found = photos(size=[32, 64], stride=32)
    assert {patch.image.shape for patch in found} == {(32, 64, 3)}
    cat = [patch for patch in found if patch.caption == "tabby cat"]
    for patch in cat[::7]:
        y, x = corner(patch)
        np.testing.assert_array_equal(patch.image, data.chelsea()[y : y + 32, x : x + 64])
        assert (
            patch.group == f"chelsea.png: {y // 128},{x // 128}" == f"chelsea.png: {(y + 31) // 128},{(x + 63) // 128}"
        )


@pytest.mark.parametrize("params", [{"size": 4}, {"size": [64, 129]}, {"size": 64, "block": 32}, {"stride": 0}])
def test_bad_params(params):
    with pytest.raises(UserError, match="size must be from 8 to block, and stride at least 1"):
        photos(**params)
