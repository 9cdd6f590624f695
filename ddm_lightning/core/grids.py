"""Labelled grids of small images."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from matplotlib import get_data_path
from matplotlib.axes import Axes
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from ddm_lightning.core.files import atomic_write

# Height and width in pixels to which small squares are enlarged.
CELL_SIZE = 72
_GAP = 4
_MARGIN = 12
_FONT_SIZE = 13
_TITLE_SIZE = 17
_FOOTER_SIZE = 10
_MAX_LABEL_WIDTH = 260
_MAX_LABEL_LINES = 4
_INK = (20, 20, 20)
_PALE_INK = (110, 110, 110)
_PAPER = (255, 255, 255)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


def labelled_grid(
    rows: Sequence[tuple[str, Sequence[UInt8[np.ndarray, "h w 3"]]]],
    scale: int,
    title: str = "",
    footer: str = "",
    headings: Sequence[str] = (),
) -> Image.Image:
    """Draw rows of images with a label to the left of each row.

    Args:
        rows: label and images of each row, at least one image in all; rows may differ in length. A column is as wide as
            the widest image, a row as high as its highest; smaller ones are in the middle of their cells.
        scale: enlargement factor, by Lanczos, which makes small images easier to recognise.
        title: line above the grid.
        footer: small text below the grid, such as a credit.
        headings: text above each column, shortened to its width; none without them.
    """
    cell_height = 0
    cell_width = 0
    for _, images in rows:
        for image in images:
            cell_height = max(cell_height, scale * image.shape[0])
            cell_width = max(cell_width, scale * image.shape[1])

    heights = []
    for _, images in rows:
        highest = scale * max(map(len, images), default=0)
        heights.append(highest or cell_height)

    # Matplotlib's own font makes a grid look the same on every machine, and has accents, Greek and Cyrillic.
    path = f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    font = ImageFont.truetype(path, _FONT_SIZE)
    title_font = ImageFont.truetype(path, _TITLE_SIZE)
    footer_font = ImageFont.truetype(path, _FOOTER_SIZE)

    labels = []
    for (label, _), height in zip(rows, heights, strict=True):
        most_lines = max(1, min(_MAX_LABEL_LINES, height // (_FONT_SIZE + _GAP)))
        labels.append(_wrap(label, font, _MAX_LABEL_WIDTH, most_lines))

    label_widths = [_width(line, font) for lines in labels for line in lines]
    grid_left = _MARGIN
    if label_widths:
        grid_left += max(label_widths) + _MARGIN

    num_columns = max(len(images) for _, images in rows)
    grid_right = grid_left + num_columns * (cell_width + _GAP) - _GAP
    full_width = max(grid_right, _MARGIN + _width(title, title_font)) + _MARGIN

    grid_top = _MARGIN
    if title:
        grid_top += _TITLE_SIZE + _MARGIN
    if headings:
        grid_top += _FONT_SIZE + _GAP

    footer_lines = _wrap(footer, footer_font, full_width - 2 * _MARGIN)
    tops = [grid_top]
    for height in heights:
        tops.append(tops[-1] + height + _GAP)

    footer_top = tops[-1] - _GAP + _MARGIN
    full_height = footer_top
    if footer_lines:
        full_height += len(footer_lines) * (_FOOTER_SIZE + _GAP) + _MARGIN

    canvas = Image.new("RGB", (full_width, full_height), _PAPER)
    draw = ImageDraw.Draw(canvas)
    for column, heading in enumerate(headings):
        place = (grid_left + column * (cell_width + _GAP) + cell_width // 2, grid_top - _GAP)
        draw.text(place, _wrap(heading, font, cell_width, 1)[0], _PALE_INK, font=font, anchor="ms")

    draw.text((_MARGIN, _MARGIN), title, _INK, font=title_font)
    for lines, (_, images), top, height in zip(labels, rows, tops, heights, strict=False):
        place = (grid_left - _MARGIN, top + height // 2)
        draw.multiline_text(place, "\n".join(lines), _INK, font=font, anchor="rm", align="right", spacing=_GAP)
        for column, image in enumerate(images):
            small = Image.fromarray(np.ascontiguousarray(image))
            enlarged = small.resize((small.width * scale, small.height * scale), Image.Resampling.LANCZOS)
            left = grid_left + column * (cell_width + _GAP) + (cell_width - enlarged.width) // 2
            canvas.paste(enlarged, (left, top + (height - enlarged.height) // 2))

    for index, line in enumerate(footer_lines):
        draw.text((_MARGIN, footer_top + index * (_FOOTER_SIZE + _GAP)), line, _PALE_INK, font=footer_font)

    return canvas


def scale_of(image: UInt8[np.ndarray, "h w 3"]) -> int:
    """Factor that enlarges small images to the area of a square of about ``CELL_SIZE`` pixels."""
    height, width, _ = image.shape
    return max(1, CELL_SIZE // math.isqrt(height * width))


def heat_map(axis: Axes, values: np.ndarray, numbers: np.ndarray, form: str, **options: Any) -> None:
    """Draw a matrix as colours, with ``numbers`` in its cells.

    Args:
        axis: where to draw.
        values: the matrix.
        numbers: one for each cell.
        form: their format, such as ``.2f``.
        options: of ``imshow``.
    """
    image = axis.imshow(values, **options)
    axis.set(xticks=range(values.shape[1]), yticks=range(values.shape[0]))
    for (row, column), number in np.ndenumerate(numbers):
        red, green, blue, _ = image.to_rgba(values[row, column])
        is_dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
        colour = "w" if is_dark else "k"
        axis.text(column, row, f"{number:{form}}", ha="center", va="center", fontsize="x-small", color=colour)


def save_png(path: Path, image: Image.Image, texts: PngInfo | None = None) -> None:
    """Write ``image`` to ``path`` as PNG with these text chunks, atomically."""
    atomic_write(path, lambda temporary: image.save(temporary, format="PNG", pnginfo=texts))


def _width(text: str, font: Font) -> int:
    return int(np.ceil(font.getlength(text)))


def _wrap(text: str, font: Font, width: int, most_lines: int | None = None) -> list[str]:
    """Wrap ``text`` into lines of about ``width`` pixels; cut what does not fit."""
    num_letters = max(4, int(width / font.getlength("n")))  # about the mean width of a letter
    return textwrap.wrap(text, num_letters, max_lines=most_lines, placeholder="...")
