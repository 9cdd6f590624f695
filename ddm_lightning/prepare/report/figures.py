"""The charts of the report, each drawn for light and for dark pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from ddm_lightning.prepare.report.measures import Measures, ReportData

_SIZE = (5.6, 4.3)
_DOTS_PER_INCH = 160
_MOST_NUMBERS = 10  # of rows of a matrix that still has room for numbers
_MOST_TICKS = 24


@dataclass(frozen=True)
class Theme:
    """Colours of a page."""

    ink: str
    faint: str
    paper: str
    accent: str


LIGHT = Theme("#1c1f24", "#c9ced6", "#ffffff", "#2c64c6")
DARK = Theme("#e4e7eb", "#4a505a", "#1b1e23", "#6fa0f5")


def cluster_colours(num_clusters: int) -> list[tuple[float, float, float]]:
    """One colour a cluster, red, green and blue from 0 to 1: neighbours in number differ most."""
    if num_clusters <= 10:
        return [colormaps["tab10"](k)[:3] for k in range(num_clusters)]
    return [colormaps["turbo"](0.12 + 0.83 * (k * 0.618034 % 1))[:3] for k in range(num_clusters)]


def to_png(figure: Figure) -> bytes:
    """The figure as PNG bytes; the same figure gives the same bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=_DOTS_PER_INCH)
    return stream.getvalue()


def sizes(data: ReportData, theme: Theme) -> Figure:
    """Samples in each cluster, with their mean."""
    figure, axes = _blank(theme)
    mean = float(data.counts.mean())
    bars = axes.bar(range(data.num_clusters), data.counts, color=theme.accent, width=0.75)
    if data.num_clusters <= _MOST_NUMBERS:
        labels = [f"{count:,}" for count in data.counts]
        axes.bar_label(bars, labels, label_type="center", color=theme.paper, fontsize=9)
    axes.axhline(mean, color=theme.ink, linestyle=(0, (4, 3)), linewidth=1)
    axes.set_title(f"Samples in each cluster (dashed: mean, {mean:,.0f})", color=theme.ink, fontsize=10, loc="left")
    axes.set_xlabel("cluster")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.margins(y=0.08)
    _cluster_ticks(axes, range(data.num_clusters), "x")
    return figure


def silhouettes(data: ReportData, measures: Measures, theme: Theme) -> Figure:
    """Every measured sample's silhouette, sorted within its cluster, with each cluster's mean."""
    figure, axes = _blank(theme)
    clusters = data.clusters[measures.rows]
    colours = cluster_colours(data.num_clusters)
    gap = 0.01 * len(clusters)
    middles, top = [], 0.0
    for cluster in range(data.num_clusters):
        values = np.sort(measures.silhouettes[clusters == cluster])
        places = top + np.arange(len(values))
        axes.fill_betweenx(places, 0, values, step="mid", color=colours[cluster], linewidth=0)
        middles.append(top + len(values) / 2)
        top += len(values) + gap
    axes.axvline(0, color=theme.ink, linewidth=0.8)
    axes.plot(measures.cluster_silhouettes, middles, "o", color=theme.ink, markersize=5, markeredgecolor=theme.paper)
    axes.set_title("Silhouette of each sample (dots: cluster means)", color=theme.ink, fontsize=10, loc="left")
    axes.set_ylim(top, 0)
    axes.set_xlabel("nearer to another cluster  ←  0  →  nearer to its own")
    axes.set_ylabel("cluster")
    _cluster_ticks(axes, middles, "y")
    return figure


def neighbours(measures: Measures, theme: Theme) -> Figure:
    """Where the samples of each cluster would go next, as a matrix."""
    figure, axes = _blank(theme)
    shares = measures.second_choices
    num = len(shares)
    colours = LinearSegmentedColormap.from_list("shares", [theme.paper, theme.accent])
    most = max(float(np.nanmax(shares)), 1e-9)
    # A square root, so that one small cluster with a single neighbour does not pale all others.
    drawn = axes.imshow(shares, cmap=colours, norm=PowerNorm(0.5, vmin=0, vmax=most))
    if num <= _MOST_NUMBERS:
        for row, column in np.argwhere(~np.eye(num, dtype=bool) & ~np.isnan(shares)):
            share = shares[row, column]
            colour = theme.paper if share > 0.35 * most else theme.ink
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=9, color=colour)
    bar = figure.colorbar(drawn, ax=axes, format=PercentFormatter(1, decimals=0))
    bar.ax.tick_params(colors=theme.ink, labelsize=8)
    bar.outline.set_edgecolor(theme.faint)
    axes.set_title("Second-nearest cluster of the samples", color=theme.ink, fontsize=10, loc="left")
    axes.set_xlabel("nearest other cluster")
    axes.set_ylabel("samples of cluster")
    axes.grid(visible=False)
    _cluster_ticks(axes, range(num), "x")
    _cluster_ticks(axes, range(num), "y")
    return figure


def sample_map(data: ReportData, measures: Measures, theme: Theme) -> Figure:
    """The measured samples in their principal plane, coloured by cluster, a cluster's number at its mean."""
    figure, axes = _blank(theme)
    clusters = data.clusters[measures.rows]
    colours = np.array(cluster_colours(data.num_clusters))
    # In an order that does not let the last cluster cover the others.
    order = np.random.default_rng(0).permutation(len(clusters))
    points: Float[np.ndarray, "m 2"] = measures.positions[order]
    axes.scatter(points[:, 0], points[:, 1], c=colours[clusters[order]], s=7, alpha=0.7, linewidths=0)
    size = 11 if data.num_clusters <= _MOST_NUMBERS else 8
    for cluster in np.unique(clusters):
        x, y = measures.positions[clusters == cluster].mean(0)
        halo = [withStroke(linewidth=3, foreground=theme.paper)]
        axes.text(
            x, y, str(cluster), color=theme.ink, weight="bold", size=size, ha="center", va="center", path_effects=halo
        )
    first, second = measures.projection.explained
    axes.set_title("Samples in the plane of most variance", color=theme.ink, fontsize=10, loc="left")
    axes.set_xlabel(f"first principal component ({first:.1%} of the variance)")
    axes.set_ylabel(f"second ({second:.1%})")
    axes.set_xticks([])
    axes.set_yticks([])
    return figure


def _blank(theme: Theme) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained", facecolor=theme.paper)
    axes = figure.add_subplot(facecolor=theme.paper)
    axes.tick_params(colors=theme.ink, labelsize=9)
    for name, spine in axes.spines.items():
        spine.set_color(theme.faint)
        spine.set_visible(name in ("left", "bottom"))
    axes.xaxis.label.set_color(theme.ink)
    axes.yaxis.label.set_color(theme.ink)
    axes.set_axisbelow(True)
    return figure, axes


def _cluster_ticks(axes: Axes, places: Sequence[float], axis: str) -> None:
    """Number the clusters at their places, leaving out what would overlap."""
    apart = (places[-1] - places[0]) / _MOST_TICKS
    shown: list[int] = []
    for cluster, place in enumerate(places):
        if not shown or place - places[shown[-1]] >= apart:
            shown.append(cluster)
    set_ticks = axes.set_xticks if axis == "x" else axes.set_yticks
    set_ticks([places[k] for k in shown], [str(k) for k in shown])
