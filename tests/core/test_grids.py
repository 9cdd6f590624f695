import time

import numpy as np

from ddm_lightning.core.grids import labelled_grid, scale_of


def picture(colour, size=4):
    return np.full((size, size, 3), colour, dtype=np.uint8)


def column_starts(image, colour):
    """Left edges of the runs of ``colour`` along the row of pixels where it is most common."""
    match = (np.asarray(image) == colour).all(2)
    line = match[match.sum(1).argmax()]
    return np.flatnonzero(np.diff(line.astype(int), prepend=0) == 1)


def test_images_lie_in_rows_and_columns_at_the_asked_size():
    red, blue = (200, 0, 0), (0, 0, 200)
    grid = labelled_grid([("a", [picture(red)] * 3), ("b", [picture(blue)] * 2)], scale=5)
    pixels = np.asarray(grid)
    assert (pixels == red).all(2).sum() == 3 * 20 * 20
    assert (pixels == blue).all(2).sum() == 2 * 20 * 20
    starts = column_starts(grid, red)
    assert len(starts) == 3
    np.testing.assert_array_equal(column_starts(grid, blue), starts[:2])
    assert np.flatnonzero((pixels == red).all(2).any(1)).max() < np.flatnonzero((pixels == blue).all(2).any(1)).min()


def test_rows_of_other_shapes_lie_in_the_middle_of_columns_and_no_higher_than_they_need():
    wide = np.full((2, 8, 3), (200, 0, 0), np.uint8)
    tall = np.full((8, 2, 3), (0, 0, 200), np.uint8)
    pixels = np.asarray(labelled_grid([("a", [wide] * 2), ("b", [tall] * 2), ("c", [wide])], scale=5))

    red, blue = ((pixels == colour).all(2) for colour in ((200, 0, 0), (0, 0, 200)))
    assert red.sum() == 3 * 10 * 40 and blue.sum() == 2 * 40 * 10
    first, second = column_starts(pixels, (200, 0, 0))
    assert column_starts(pixels, (0, 0, 200)).tolist() == [first + 15, second + 15]
    tops = np.flatnonzero(np.diff((red | blue).any(1).astype(int), prepend=0) == 1)
    assert np.diff(tops).tolist() == [10 + 4, 40 + 4]
    assert (pixels[tops[1] : tops[1] + 40, first : first + 15] == 255).all(), "white"


def test_labels_title_and_footer_are_drawn_beside_the_images():
    rows = [("red", [picture((200, 0, 0), 16)] * 4)]
    bare = labelled_grid([("", rows[0][1])], 3)
    labelled = labelled_grid(rows, 3)
    titled = labelled_grid(rows, 3, title="a title")
    credit = "drawn by somebody whose licence asks for a line of credit below each sheet"
    credited = labelled_grid(rows, 3, footer=credit)

    assert labelled.width > bare.width
    assert titled.height > labelled.height
    ink = (np.asarray(credited)[labelled.height :] < 200).any()
    assert ink and credited.height > labelled.height + 20, "a footer wider than the grid is wrapped"
    for image in (labelled, titled, credited):
        assert (np.asarray(image) == (200, 0, 0)).all(2).sum() == 4 * 48 * 48, "no text covers an image"


def test_a_long_label_goes_on_in_further_lines_while_there_is_room():
    def inked_rows(label, size):
        sheet = np.asarray(labelled_grid([(label, [picture((255, 255, 255), size)])], 3))
        return int((sheet < 128).any((1, 2)).sum())

    one, several = (inked_rows("a prompt of many words " * n, 48) for n in (1, 4))
    assert several > 2 * one
    assert inked_rows("a prompt of many words " * 4, 8) <= one, "a low cell has room for one line"


def test_a_label_of_any_length_is_shortened_in_linear_time():
    row = [picture((1, 2, 3))]
    start = time.process_time()
    long = labelled_grid([("x" * 20_000, row)], 3)

    assert long.width < 2 * labelled_grid([("x" * 25, row)], 3).width
    assert time.process_time() - start < 10, "a quadratic search takes minutes"


def test_shapes_of_equal_area_are_enlarged_alike():
    shapes = ((8, 8), (4, 16), (16, 4), (200, 100))
    assert [scale_of(np.zeros((*shape, 3), np.uint8)) for shape in shapes] == [9, 9, 9, 1]
