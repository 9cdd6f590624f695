import numpy as np
import pytest
from source_files import lanczos

from ddm_lightning.prepare.reading import to_square


def noise(height, width, seed=0):
    return np.random.default_rng(seed).integers(60, 190, (height, width, 3), dtype=np.uint8)


def scaled(image, rows, columns):
    return np.einsum("ih,jw,hwc->ijc", rows, columns, image.astype(float)).clip(0, 255)


def assert_near(found, expected):
    # Pillow rounds its weights, and once between the two directions.
    assert found.dtype == np.uint8 and found.shape == expected.shape
    assert np.abs(found - expected).max() <= 2


SHAPES = [(20, 31), (31, 20), (7, 8), (8, 7), (33, 33), (5, 64), (64, 5), (3, 2)]


@pytest.mark.parametrize("aspect", ["crop", "stretch"])
@pytest.mark.parametrize("size", [1, 8, 9])
@pytest.mark.parametrize(("height", "width"), SHAPES)
def test_the_square_in_the_middle_or_the_whole_image_is_scaled(height, width, size, aspect):
    image = noise(height, width)
    top = left = 0
    if aspect == "crop":
        side = min(height, width)
        top, left = (height - side) / 2, (width - side) / 2

    rows = lanczos(height, top, height - 2 * top, size)
    columns = lanczos(width, left, width - 2 * left, size)

    assert_near(to_square(image, size, aspect), scaled(image, rows, columns))


@pytest.mark.parametrize(
    ("height", "width", "size", "top", "left", "inner"),
    [
        (20, 40, 10, 2, 0, (5, 10)),
        (40, 20, 10, 0, 2, (10, 5)),
        (30, 20, 9, 0, 1, (9, 6)),
        (1, 100, 8, 3, 0, (1, 8)),
        (12, 12, 6, 0, 0, (6, 6)),
        (2, 4, 16, 4, 0, (8, 16)),
    ],
)
def test_pad_keeps_the_whole_image_on_white(height, width, size, top, left, inner):
    image = noise(height, width)
    found = to_square(image, size, "pad")
    rows, columns = lanczos(height, 0, height, inner[0]), lanczos(width, 0, width, inner[1])
    window = found[top : top + inner[0], left : left + inner[1]]
    assert_near(window, scaled(image, rows, columns))
    white = found.astype(int).sum() - window.astype(int).sum()
    assert white == 255 * 3 * (size * size - inner[0] * inner[1])


@pytest.mark.parametrize("aspect", ["crop", "pad", "stretch"])
def test_one_pixel_becomes_a_plain_square_and_the_right_size_stays_as_it_is(aspect):
    pixel = np.array([[[10, 20, 30]]], np.uint8)
    np.testing.assert_array_equal(to_square(pixel, 5, aspect), np.broadcast_to(pixel, (5, 5, 3)))
    image = noise(9, 9)
    np.testing.assert_array_equal(to_square(image, 9, aspect), image)
