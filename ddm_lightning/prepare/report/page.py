"""Write the report: PNG files, TensorBoard events, and one HTML page that needs no network and no scripts."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int, Int64, UInt8
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.files import atomic_folder, read_json
from ddm_lightning.core.grids import labelled_grid, save_png
from ddm_lightning.partition.partition import NearestCentroid, Partition
from ddm_lightning.prepare.encode import FEATURES
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.reading import Plugins
from ddm_lightning.prepare.report.measures import (
    MAX_ROWS,
    Measures,
    ReportData,
    choose_rows,
    measure,
    to_metric_space,
)
from ddm_lightning.shards.manifest import OUT_OF_CLUSTER
from ddm_lightning.shards.verify import verify_shards

PAGE = "report.html"
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
_MAP_CELLS, _MAP_CELL_PIXELS, _MAP_FRAME = (20, 14), 48, 3
_MAX_NEIGHBOURS, _MAX_CAPTIONS = 3, 8
_FORMATS = {"thousands": ",d", "number": ".3f", "percent": ".0%", "percent1": ".1%", "percent2": ".2%"}


def _number(value: float, style: str) -> str:
    """Format a number, NaN as a dash."""
    return "–" if math.isnan(value) else format(value, style)


_TEMPLATES = Environment(
    loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_TEMPLATES.filters |= {name: partial(_number, style=style) for name, style in _FORMATS.items()}


def report_partition(experiment: Experiment, plugins: Plugins, prepared: Prepared) -> None:
    """Write ``clusters.png`` and ``report/`` of a prepared data set."""
    config, index = experiment.prepare, prepared.index
    credit: dict[str, Any] = {
        "title": f"{experiment.name}: clusters of {config.source.name}, by {config.features.name}",
        "attribution": plugins.source.attribution,
        "seed": experiment.seed,
    }
    partition = Partition.load(prepared.partition_file)
    thumbnails, rows = prepared.thumbnails()
    facts = read_json(prepared.partition_facts_file, "the figures of the partition", "run prepare again")
    clusters = prepared.clusters
    data = ReportData(
        thumbnails=thumbnails,
        thumbnail_rows=rows,
        captions=prepared.texts("captions").take(rows).tolist(),
        features=prepared.rows(FEATURES, "features"),
        clusters=clusters,
        metric=partition.rule.metric if isinstance(partition.rule, NearestCentroid) else config.partition.metric,
        counts=np.bincount(clusters, minlength=partition.num_clusters),
        num_read=index["num_read"],
        broken=index["broken"],
        num_without_caption=index["num_without_caption"],
        num_out_of_cluster=sum(verify_shards(path, False) for path in prepared.shards.glob(f"*/{OUT_OF_CLUSTER}")),
        displaced=facts["displaced"] and tuple(facts["displaced"]),
        facts={name: getattr(config, name.replace(" ", "_")).name for name in ("source", "features", "image encoder")},
    )
    save_png(prepared.folder / "clusters.png", cluster_grid(data, **credit))
    write_report(prepared.folder / "report", data, **credit)


def write_report(folder: Path, data: ReportData, *, title: str, attribution: str, seed: int) -> None:
    """Write the report of a partition, whole or not at all; replace an earlier one.

    All files are deterministic.

    Args:
        folder: becomes the report.
        data: the prepared data set.
        title: of the page.
        attribution: credit, printed on the page.
        seed: chooses the measured samples and the images.
    """
    measures = measure(data, seed)
    shown = choose_images(data.clusters[data.thumbnail_rows], data.num_clusters, seed)
    images = draw_charts(data, measures)
    if len(data.thumbnails):
        images["map"] = _encode(draw_image_map(data, measures, seed), "PNG")
    html = _TEMPLATES.get_template("report.html.j2").render(
        title=title,
        attribution=attribution,
        data=data,
        measures=measures,
        images={name: _data_url(png, "png") for name, png in images.items()},
        clusters=[_describe_cluster(data, measures, k, indices) for k, indices in enumerate(shown)],
        broken=sorted(data.broken.items(), key=lambda item: (-item[1], item[0])),
    )
    with atomic_folder(folder) as temporary:
        for name, png in images.items():
            (temporary / f"{name}.png").write_bytes(png)
        # Captions may contain lone surrogates.
        (temporary / PAGE).write_bytes(html.encode("utf-8", "replace"))


def _describe_cluster(
    data: ReportData, measures: Measures, cluster: int, indices: Int64[np.ndarray, "shown"]
) -> dict[str, Any]:
    distances = measures.centroid_distances[cluster]
    nearest = [int(k) for k in np.argsort(distances, kind="stable") if k != cluster]
    captions = [data.captions[i] for i in indices] if data.captions else [""] * len(indices)
    webp = [_encode(Image.fromarray(data.thumbnails[i]), "WEBP", quality=90) for i in indices]
    return {
        "colour": cluster_colours(data.num_clusters)[cluster],
        "count": int(data.counts[cluster]),
        "silhouette": measures.cluster_silhouettes[cluster],
        "neighbours": [(k, distances[k], measures.second_choices[cluster, k]) for k in nearest[:_MAX_NEIGHBOURS]],
        "images": [(_data_url(image, "webp"), text) for image, text in zip(webp, captions, strict=True)],
        "captions": [text for text in dict.fromkeys(captions) if text.strip()][:_MAX_CAPTIONS],
    }


def _data_url(image: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def _encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()


def cluster_colours(num_clusters: int) -> list[str]:
    """One colour per cluster as ``#rrggbb``; consecutive clusters differ most."""
    if num_clusters <= 10:
        return [to_hex(colormaps["tab10"](k)) for k in range(num_clusters)]
    return [to_hex(colormaps["turbo"](0.12 + 0.83 * (k * 0.618034 % 1))) for k in range(num_clusters)]


def draw_charts(data: ReportData, measures: Measures) -> dict[str, bytes]:
    """Draw all charts as PNG, by name; one cluster has no silhouettes."""
    draws: dict[str, Callable[[Axes, ReportData, Measures], None]] = {"sizes": _draw_sizes}
    if data.num_clusters > 1:
        draws["silhouette"] = _draw_silhouettes
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


def _label_clusters(set_ticks: Callable[..., Any], places: Sequence[float]) -> None:
    """Label the clusters at their places; skip labels so that at most ``_MAX_TICKS`` remain."""
    step = math.ceil(len(places) / _MAX_TICKS)
    set_ticks(places[::step], [str(k) for k in range(0, len(places), step)])


def draw_image_map(data: ReportData, measures: Measures, seed: int) -> Image.Image:
    """Place thumbnails in the principal plane, framed in their cluster's colour."""
    chosen = choose_rows(len(data.thumbnails), MAX_ROWS, seed)
    rows = data.thumbnail_rows[chosen]
    positions = measures.plane.project(to_metric_space(data.features.take(rows), data.metric))
    colours = cluster_colours(data.num_clusters)
    return place_images(data.thumbnails[chosen], positions, [colours[k] for k in data.clusters[rows]])


def place_images(
    images: UInt8[np.ndarray, "m s s 3"], positions: Float[np.ndarray, "m 2"], frames: Sequence[str]
) -> Image.Image:
    """Place images on a grid by their positions: in each cell the one nearest to its centre.

    Args:
        images: at least one.
        positions: x to the right, y upwards.
        frames: frame colour of each image.
    """
    low, high = positions.min(0), positions.max(0)
    places = (positions - low) / np.where(high > low, high - low, 1.0) * _MAP_CELLS
    cells = np.minimum(places.astype(np.int64), np.array(_MAP_CELLS) - 1)
    off_centre = np.square(places - cells - 0.5).sum(1)
    nearest = {tuple(cells[index]): index for index in np.argsort(-off_centre, kind="stable")}
    side, inner = _MAP_CELL_PIXELS, _MAP_CELL_PIXELS - 2 * _MAP_FRAME
    canvas = Image.new("RGB", (_MAP_CELLS[0] * side, _MAP_CELLS[1] * side), _PAPER)
    for (column, row), index in nearest.items():
        left, top = int(column) * side, (_MAP_CELLS[1] - 1 - int(row)) * side
        canvas.paste(frames[index], (left + 1, top + 1, left + side - 1, top + side - 1))
        canvas.paste(Image.fromarray(images[index]).resize((inner, inner)), (left + _MAP_FRAME, top + _MAP_FRAME))
    return canvas


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
