"""Pictures of the clusters: some samples of each, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64, UInt8
from PIL import Image

from ddm_lightning.core.grids import labelled_grid, save_png
from ddm_lightning.prepare.report.measures import ReportData

_COLUMNS = 18
_CELL_PIXELS = 72
_SHEET_COLUMNS = 12
_MOST_PICTURES, _FEWEST_PICTURES, _PICTURES_IN_ALL = 36, 6, 1152
_MAP_CELLS = (20, 14)
_MAP_CELL_PIXELS, _MAP_FRAME = 48, 3


def save_cluster_grid(
    path: Path,
    images: UInt8[np.ndarray, "n h w 3"],
    clusters: Int[np.ndarray, "n"],
    num_clusters: int,
    *,
    title: str,
    attribution: str,
    seed: int,
    counts: Int[np.ndarray, "k"] | None = None,
) -> None:
    """Write a PNG with a row of pictures a cluster, drawn at random, labelled with its size and share.

    Args:
        path: of the PNG.
        images: all samples' pictures, or those of some.
        clusters: of these pictures.
        num_clusters: K.
        title: line above the rows.
        attribution: credit below them.
        seed: of the choice.
        counts: samples of each cluster, where ``images`` are not all of them.
    """
    sizes = np.bincount(clusters, minlength=num_clusters) if counts is None else counts
    rows = []
    for cluster, size in enumerate(sizes):
        shown = some_of_cluster(clusters, cluster, _COLUMNS, seed)
        rows.append(
            (f"cluster {cluster} · {size:,} ({size / sizes.sum():.1%})", [np.asarray(images[i]) for i in shown])
        )
    save_png(path, labelled_grid(rows, _scale(images.shape[1]), title, footer=attribution))


def some_of_cluster(clusters: Int[np.ndarray, "m"], cluster: int, most: int, seed: int) -> Int64[np.ndarray, "shown"]:
    """Positions of at most ``most`` members of one cluster, in random order."""
    return np.random.default_rng([seed, cluster]).permutation(np.flatnonzero(clusters == cluster))[:most]


def pictures_shown(data: ReportData, seed: int) -> list[Int64[np.ndarray, "shown"]]:
    """Which thumbnails stand for each cluster: fewer of each where there are many clusters."""
    most = max(_FEWEST_PICTURES, min(_MOST_PICTURES, _PICTURES_IN_ALL // data.num_clusters))
    clusters = data.clusters[data.thumbnail_rows]
    return [some_of_cluster(clusters, cluster, most, seed) for cluster in range(data.num_clusters)]


def cluster_sheet(pictures: UInt8[np.ndarray, "m s s 3"], title: str, attribution: str) -> Image.Image:
    """One cluster's pictures in rows."""
    rows = [("", list(pictures[i : i + _SHEET_COLUMNS])) for i in range(0, len(pictures), _SHEET_COLUMNS)]
    return labelled_grid(rows, _scale(pictures.shape[1]), title, footer=attribution)


def picture_map(
    thumbnails: UInt8[np.ndarray, "m s s 3"],
    positions: Int[np.ndarray, "m 2"] | np.ndarray,
    frames: Sequence[tuple[int, int, int]],
) -> Image.Image:
    """Thumbnails where they lie on the map: one a cell, the nearest to its centre; cells without any stay clear.

    Args:
        thumbnails: at least one.
        positions: [m 2] on the map, x to the right and y upwards.
        frames: colour of the line around each thumbnail.
    """
    columns, rows = _MAP_CELLS
    side, inner = _MAP_CELL_PIXELS, _MAP_CELL_PIXELS - 2 * _MAP_FRAME
    low, high = positions.min(0), positions.max(0)
    span = np.where(high > low, high - low, 1.0)
    places = (positions - low) / span * np.array([columns, rows])
    cells = np.minimum(places.astype(np.int64), np.array([columns, rows]) - 1)
    off_centre = np.square(places - cells - 0.5).sum(1)
    canvas = Image.new("RGBA", (columns * side, rows * side))
    order = np.lexsort((off_centre, cells[:, 1], cells[:, 0]))
    _, first = np.unique(cells[order], axis=0, return_index=True)
    for index in order[first]:
        column, row = (int(place) for place in cells[index])
        left, top = column * side, (rows - 1 - row) * side
        canvas.paste(frames[index], (left + 1, top + 1, left + side - 1, top + side - 1))
        picture = Image.fromarray(np.ascontiguousarray(thumbnails[index])).resize((inner, inner))
        canvas.paste(picture, (left + _MAP_FRAME, top + _MAP_FRAME))
    return canvas


def _scale(pixels: int) -> int:
    return max(1, round(_CELL_PIXELS / pixels))
