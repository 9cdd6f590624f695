"""Write the report: PNG files, TensorBoard events, and one HTML page that needs no network and no scripts."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from ddm_lightning.core.files import atomic_folder
from ddm_lightning.core.formatting import amount, duration, operations
from ddm_lightning.partition.build import partition_cost
from ddm_lightning.prepare.report.figures import (
    choose_images,
    cluster_colours,
    cluster_sheet,
    draw_charts,
    draw_image_map,
)
from ddm_lightning.prepare.report.measures import Measures, ReportData, measure

PAGE = "report.html"
TENSORBOARD = "tensorboard"
_MAX_NEIGHBOURS, _MAX_CAPTIONS = 3, 8
_PAPER_SAMPLES, _PAPER_WIDTH = 158_000_000, 1024
_FORMATS = {"thousands": ",d", "number": ".3f", "percent": ".0%", "percent1": ".1%", "percent2": ".2%"}
_GFLOPS, _DISK_GB_PER_S = (100.0, 10_000.0), 1.0
_SMALL_FIT_FRACTION = 0.05


def _or_dash(style: str) -> Callable[[float], str]:
    """Format a number, NaN as a dash."""
    return lambda value: "–" if math.isnan(value) else format(value, style)


_TEMPLATES = Environment(
    loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_TEMPLATES.filters |= {name: _or_dash(style) for name, style in _FORMATS.items()}


def write_report(folder: Path, data: ReportData, *, title: str, attribution: str, seed: int) -> None:
    """Write the report of a partition, whole or not at all; replace an earlier one.

    The PNG files and the page are deterministic. The TensorBoard events contain the time.

    Args:
        folder: becomes the report.
        data: the prepared data set.
        title: of the page and the cluster sheets.
        attribution: credit, printed on the cluster sheets and the page.
        seed: chooses the measured samples and the images.
    """
    measures = measure(data, seed)
    shown = choose_images(data.clusters[data.thumbnail_rows], data.num_clusters, seed)
    images = draw_charts(data, measures)
    if len(data.thumbnails):
        images["map_pictures"] = _encode(draw_image_map(data, measures, seed), "PNG")
    html = _TEMPLATES.get_template("report.html.j2").render(
        title=title,
        attribution=attribution,
        data=data,
        measures=measures,
        separation=_describe_separation(measures.silhouettes.mean()),
        images={name: _data_url(png, "png") for name, png in images.items()},
        clusters=[_describe_cluster(data, measures, k, indices) for k, indices in enumerate(shown)],
        broken=sorted(data.broken.items(), key=lambda item: (-item[1], item[0])),
        columns=_column_sizes(data),
        costs=_partition_costs(data),
        rates=[f"at {operations(gflops * 1e9)}/s" for gflops in _GFLOPS],
        disk=f"{_DISK_GB_PER_S:g} GB/s",
    )
    for k, indices in enumerate(shown):
        if len(indices):
            heading = f"{title}: cluster {k} · {data.counts[k]:,} samples"
            images[f"cluster-{k}"] = _encode(cluster_sheet(data.thumbnails[indices], heading, attribution), "PNG")
    with atomic_folder(folder) as temporary:
        for name, png in images.items():
            (temporary / f"{name}.png").write_bytes(png)
        # Captions may contain lone surrogates.
        (temporary / PAGE).write_bytes(html.encode("utf-8", "replace"))
        _write_events(temporary / TENSORBOARD, data, measures, images)


def _write_events(folder: Path, data: ReportData, measures: Measures, images: dict[str, bytes]) -> None:
    """Write all images, and scalars with the cluster as the step."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for name, png in images.items():
            pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
            writer.add_image(f"partition/{name}", pixels, dataformats="HWC")
        for cluster, (count, value) in enumerate(zip(data.counts, measures.cluster_silhouettes, strict=True)):
            writer.add_scalar("partition/samples", int(count), cluster)
            writer.add_scalar("partition/share", count / data.num_samples, cluster)
            if not math.isnan(value):
                writer.add_scalar("partition/silhouette", value, cluster)
        writer.add_scalar("partition/largest_over_mean", data.counts.max() / data.counts.mean())


def _describe_separation(silhouette: float) -> str:
    if silhouette > 0.25:
        return "well apart" if silhouette > 0.5 else "apart"
    return "close to one another" if silhouette > 0 else "mixed"


def _describe_cluster(
    data: ReportData, measures: Measures, cluster: int, indices: Int64[np.ndarray, "shown"]
) -> dict[str, Any]:
    distances = measures.centroid_distances[cluster]
    nearest = [int(k) for k in np.argsort(distances, kind="stable") if k != cluster]
    captions = [data.captions[i] for i in indices] if data.captions else [""] * len(indices)
    return {
        "colour": cluster_colours(data.num_clusters)[cluster],
        "count": int(data.counts[cluster]),
        "share": data.counts[cluster] / data.num_samples,
        "over_mean": data.counts[cluster] / data.counts.mean(),
        "silhouette": measures.cluster_silhouettes[cluster],
        "neighbours": [(k, distances[k], measures.second_choices[cluster, k]) for k in nearest[:_MAX_NEIGHBOURS]],
        "images": [(_thumbnail_url(data.thumbnails[i]), text) for i, text in zip(indices, captions, strict=True)],
        "captions": [text for text in dict.fromkeys(captions) if text.strip()][:_MAX_CAPTIONS],
    }


def _column_sizes(data: ReportData) -> list[list[str]]:
    """Disk space of each column: here, for one sample, for 1 million and for the paper's 158 million samples."""
    if not data.column_bytes:
        return []
    totals = {**data.column_bytes, "together": sum(data.column_bytes.values())}
    scales = (1.0, 1 / data.num_samples, 1e6 / data.num_samples, _PAPER_SAMPLES / data.num_samples)
    return [[name, *(amount(num_bytes * scale) for scale in scales)] for name, num_bytes in totals.items()]


def _partition_costs(data: ReportData) -> list[list[str]]:
    """Modelled work, bytes read and time of k-means: here and on the paper's data set."""
    if data.kmeans is None:
        return []
    settings, fraction = data.kmeans, data.kmeans.fit_fraction
    sizes = [("here", data.num_samples, data.features.row_shape[0], fraction)]
    for part in sorted({fraction, min(fraction, _SMALL_FIT_FRACTION)}, reverse=True):
        sizes.append((f"158 M × 1,024, fitted on {part:.0%}", _PAPER_SAMPLES, _PAPER_WIDTH, part))
    rows = []
    for name, num_samples, width, part in sizes:
        slow, fast = (
            partition_cost(
                num_samples,
                width,
                settings.num_fine_centroids,
                settings.num_iterations,
                gflops,
                _DISK_GB_PER_S,
                fit_fraction=part,
                bytes_per_number=data.features.dtype.itemsize,
            )
            for gflops in _GFLOPS
        )
        rows.append([name, operations(slow.flops), amount(slow.bytes), duration(slow.seconds), duration(fast.seconds)])
    return rows


def _thumbnail_url(image: UInt8[np.ndarray, "s s 3"]) -> str:
    return _data_url(_encode(Image.fromarray(image), "WEBP", quality=90), "webp")


def _data_url(image: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def _encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()
