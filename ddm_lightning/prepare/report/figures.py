"""Charts of a partition and grids of its images."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import numpy as np
from jaxtyping import Int, Int64
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import Image

from ddm_lightning.core.grids import labelled_grid
from ddm_lightning.prepare.report.measures import Measures, ReportData

_INK, _PAPER, _ACCENT = "#1c1f24", "#ffffff", "#2c64c6"
_STYLE: Any = {
    "figure.figsize": (5.6, 4.3),
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "font.size": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
}
_MAX_ANNOTATED_CLUSTERS, _MAX_TICKS = 10, 24
_CELL_PIXELS = 72
_GRID_COLUMNS = 18
_MIN_SHOWN, _MAX_SHOWN, _MAX_SHOWN_IN_ALL = 6, 36, 1152


def cluster_colours(num_clusters: int) -> list[str]:
    """One colour per cluster as ``#rrggbb``; consecutive clusters differ most."""
    if num_clusters <= 10:
        return [to_hex(colormaps["tab10"](k)) for k in range(num_clusters)]
    return [to_hex(colormaps["turbo"](0.12 + 0.83 * (k * 0.618034 % 1))) for k in range(num_clusters)]


def draw_charts(data: ReportData, measures: Measures) -> dict[str, bytes]:
    """Draw all charts as PNG, by name; one cluster has neither silhouettes nor neighbours."""
    draws: dict[str, Callable[[Axes, ReportData, Measures], None]] = {"sizes": _draw_sizes, "map": _draw_map}
    if data.num_clusters > 1:
        draws |= {"silhouette": _draw_silhouettes, "neighbours": _draw_neighbours}
    charts = {}
    for name, draw in draws.items():
        with rc_context(_STYLE):
            figure, stream = Figure(), io.BytesIO()
            draw(figure.add_subplot(), data, measures)
            figure.savefig(stream, format="png")
        charts[name] = stream.getvalue()
    return charts


def _draw_sizes(axes: Axes, data: ReportData, _: Measures) -> None:
    counts = data.counts
    bars = axes.bar(range(len(counts)), counts, color=_ACCENT, width=0.75)
    if len(counts) <= _MAX_ANNOTATED_CLUSTERS:
        axes.bar_label(bars, fmt="{:,.0f}", label_type="center", color=_PAPER)
    axes.axhline(counts.mean(), color=_INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.set(title=f"Samples per cluster (dashed: mean, {counts.mean():,.0f})", xlabel="cluster")
    _label_clusters(axes.set_xticks, range(len(counts)))


def _draw_silhouettes(axes: Axes, data: ReportData, measures: Measures) -> None:
    """Draw every measured silhouette, sorted within its cluster, and each cluster's mean."""
    clusters = data.clusters[measures.rows]
    gap = 0.01 * len(clusters)
    centres, top = [], 0.0
    for cluster, colour in enumerate(cluster_colours(data.num_clusters)):
        values = np.sort(measures.silhouettes[clusters == cluster])
        axes.fill_betweenx(top + np.arange(len(values)), 0, values, step="mid", color=colour, linewidth=0)
        centres.append(top + len(values) / 2)
        top += len(values) + gap
    axes.axvline(0, color=_INK, linewidth=0.8)
    axes.plot(measures.cluster_silhouettes, centres, "o", color=_INK, markersize=5, markeredgecolor=_PAPER)
    axes.set(title="Silhouette of each sample (dots: cluster means)", ylabel="cluster", ylim=(top, 0))
    axes.set_xlabel("nearer to another cluster  ←  0  →  nearer to its own")
    _label_clusters(axes.set_yticks, centres)


def _draw_neighbours(axes: Axes, data: ReportData, measures: Measures) -> None:
    """Draw the matrix of second-nearest clusters."""
    num_clusters, shares, largest = data.num_clusters, measures.second_choices, np.nanmax(measures.second_choices)
    # The square root keeps small shares visible beside a cluster with a single neighbour.
    norm = PowerNorm(0.5, vmin=0, vmax=largest)
    image = axes.imshow(shares, cmap=LinearSegmentedColormap.from_list("shares", [_PAPER, _ACCENT]), norm=norm)
    if num_clusters <= _MAX_ANNOTATED_CLUSTERS:
        for row, column in np.argwhere(~np.eye(num_clusters, dtype=bool) & ~np.isnan(shares)):
            share = shares[row, column]
            colour = _PAPER if share > 0.35 * largest else _INK
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", color=colour)
    axes.figure.colorbar(image, ax=axes, format=PercentFormatter(1, decimals=0))
    axes.set(title="Second-nearest cluster", xlabel="nearest other cluster", ylabel="samples of cluster")
    _label_clusters(axes.set_xticks, range(num_clusters))
    _label_clusters(axes.set_yticks, range(num_clusters))


def _draw_map(axes: Axes, data: ReportData, measures: Measures) -> None:
    """Draw every measured sample on the plane of largest variance, in its cluster's colour."""
    colours = cluster_colours(data.num_clusters)
    x, y = measures.plane.T
    axes.scatter(x, y, s=4, c=[colours[k] for k in data.clusters[measures.rows]], linewidths=0)
    axes.set(title="Samples on the plane of largest variance", xticks=[], yticks=[])


def _label_clusters(set_ticks: Callable[..., Any], places: Sequence[float]) -> None:
    """Label the clusters at their places; skip labels so that at most ``_MAX_TICKS`` remain."""
    step = ceil(len(places) / _MAX_TICKS)
    set_ticks(places[::step], [str(k) for k in range(0, len(places), step)])


def choose_images(
    clusters: Int[np.ndarray, "m"], num_clusters: int, seed: int, max_images: int | None = None
) -> list[Int64[np.ndarray, "shown"]]:
    """Choose the indices of at most ``max_images`` random images of each cluster.

    The default is 36, and fewer with many clusters.
    """
    if max_images is None:
        max_images = max(_MIN_SHOWN, min(_MAX_SHOWN, _MAX_SHOWN_IN_ALL // num_clusters))
    members = (np.flatnonzero(clusters == cluster) for cluster in range(num_clusters))
    return [np.random.default_rng([seed, k]).permutation(indices)[:max_images] for k, indices in enumerate(members)]


def cluster_grid(data: ReportData, title: str, attribution: str, seed: int) -> Image.Image:
    """Arrange random images in one row per cluster, labelled with the cluster's size and share."""
    chosen = choose_images(data.clusters[data.thumbnail_rows], data.num_clusters, seed, _GRID_COLUMNS)
    rows = [
        (f"cluster {k} · {count:,} ({count / data.counts.sum():.1%})", list(data.thumbnails[indices]))
        for k, (count, indices) in enumerate(zip(data.counts, chosen, strict=True))
    ]
    scale = max(1, round(_CELL_PIXELS / data.thumbnails.shape[1]))
    return labelled_grid(rows, scale, title, footer=attribution)
