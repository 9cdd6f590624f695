"""The report's files: charts and grids as PNG, TensorBoard events, and the page."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
from PIL import Image

from ddm_lightning.core.files import atomic_folder
from ddm_lightning.prepare.report import figures
from ddm_lightning.prepare.report.grids import cluster_sheet, picture_map, pictures_shown
from ddm_lightning.prepare.report.measures import MOST_ROWS, Measures, ReportData, measure, prepared, some_rows
from ddm_lightning.prepare.report.page import Charts, page

PAGE = "report.html"
TENSORBOARD = "tensorboard"


def write_report(folder: Path, data: ReportData, *, title: str, attribution: str, seed: int) -> list[Path]:
    """Write the report of a partition as ``folder``, whole or not at all, in place of an earlier one.

    Returns the PNGs and the page, which have the same bytes for the same input. The TensorBoard events in
    ``folder / TENSORBOARD`` are not among them: they hold the time.

    Args:
        folder: becomes the report.
        data: what was prepared.
        title: of the page and of the grids.
        attribution: credit, printed on the grids and on the page.
        seed: of the samples that are measured and of the pictures that are shown.
    """
    measures = measure(data, seed)
    shown = pictures_shown(data, seed)
    light, dark = (_charts(data, measures, theme) for theme in (figures.LIGHT, figures.DARK))
    pictures = {f"{name}.png": png for name, png in light.items()}
    mapped = _picture_map(data, measures, seed)
    if mapped is not None:
        pictures["map_pictures.png"] = mapped
    for cluster, indices in enumerate(shown):
        if len(indices):
            heading = f"{title}: cluster {cluster} · {data.counts[cluster]:,} samples"
            sheet = cluster_sheet(data.thumbnails[indices], heading, attribution)
            pictures[f"cluster-{cluster}.png"] = _png(sheet)
    text = page(data, measures, Charts(light, dark, mapped), shown, title=title, attribution=attribution)
    with atomic_folder(folder) as temporary:
        for name, content in pictures.items():
            (temporary / name).write_bytes(content)
        (temporary / PAGE).write_text(text, encoding="utf-8", newline="\n")
        _write_events(temporary / TENSORBOARD, data, measures, pictures)
    return [folder / name for name in (*pictures, PAGE)]


def _charts(data: ReportData, measures: Measures, theme: figures.Theme) -> dict[str, bytes]:
    drawn = {"sizes": figures.sizes(data, theme)}
    if not np.isnan(measures.silhouettes).any():
        drawn["silhouette"] = figures.silhouettes(data, measures, theme)
    if not np.isnan(measures.second_choices).all():
        drawn["neighbours"] = figures.neighbours(measures, theme)
    drawn["map"] = figures.sample_map(data, measures, theme)
    return {name: figures.to_png(figure) for name, figure in drawn.items()}


def _picture_map(data: ReportData, measures: Measures, seed: int) -> bytes | None:
    chosen = some_rows(len(data.thumbnails), MOST_ROWS, seed)
    if not len(chosen):
        return None
    rows = data.thumbnail_rows[chosen]
    positions = measures.projection(prepared(data.features.take(rows), data.metric))
    colours = [tuple(round(255 * part) for part in colour) for colour in figures.cluster_colours(data.num_clusters)]
    frames = [colours[cluster] for cluster in data.clusters[rows]]
    return _png(picture_map(data.thumbnails[chosen], positions, frames))


def _write_events(folder: Path, data: ReportData, measures: Measures, pictures: dict[str, bytes]) -> None:
    """Scalars, a cluster a step, and all pictures."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for name, png in pictures.items():
            # On white where the picture is clear.
            image = Image.open(io.BytesIO(png)).convert("RGBA")
            flat = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
            writer.add_image(f"partition/{name.removesuffix('.png')}", np.asarray(flat), dataformats="HWC")
        for cluster, (count, value) in enumerate(zip(data.counts, measures.cluster_silhouettes, strict=True)):
            writer.add_scalar("partition/samples", int(count), cluster)
            writer.add_scalar("partition/share", count / data.num_samples, cluster)
            if not math.isnan(value):
                writer.add_scalar("partition/silhouette", value, cluster)
        writer.add_scalar("partition/largest_over_mean", data.counts.max() / data.counts.mean())


def _png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return stream.getvalue()
