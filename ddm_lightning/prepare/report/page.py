"""Write the report: PNG files, and one HTML page that needs no network and no scripts."""

from __future__ import annotations

import base64
import io
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64
from jinja2 import Environment, PackageLoader, StrictUndefined
from PIL import Image

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.files import atomic_folder, read_json
from ddm_lightning.core.formatting import amount
from ddm_lightning.core.grids import save_png
from ddm_lightning.partition.partition import NearestCentroid, Partition
from ddm_lightning.prepare.encode import FEATURES
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.reading import Plugins
from ddm_lightning.prepare.report import figures
from ddm_lightning.prepare.report.measures import Measures, ReportData, measure
from ddm_lightning.prepare.write_shards import samples_of
from ddm_lightning.shards.manifest import OUT_OF_CLUSTER
from ddm_lightning.shards.verify import verify_shards

PAGE = "report.html"
_MAX_NEIGHBOURS, _MAX_CAPTIONS = 3, 8
_PAPER_SAMPLES = 158_000_000
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
    counts = np.bincount(clusters, minlength=partition.num_clusters)
    columns = samples_of(prepared, plugins).columns.items()
    data = ReportData(
        thumbnails=thumbnails,
        thumbnail_rows=rows,
        captions=prepared.texts("captions").take(rows).tolist(),
        features=prepared.rows(FEATURES, "features"),
        clusters=clusters,
        metric=partition.rule.metric if isinstance(partition.rule, NearestCentroid) else config.partition.metric,
        counts=counts,
        num_read=index["num_read"],
        broken=index["broken"],
        num_without_caption=index["num_without_caption"],
        num_out_of_cluster=sum(verify_shards(path, False) for path in prepared.shards.glob(f"*/{OUT_OF_CLUSTER}")),
        displaced=facts["displaced"] and tuple(facts["displaced"]),
        facts={name: getattr(config, name.replace(" ", "_")).name for name in ("source", "features", "image encoder")},
        column_bytes={name: len(rows) * rows.row_bytes for name, rows in columns},
    )
    save_png(prepared.folder / "clusters.png", figures.cluster_grid(data, **credit))
    write_report(prepared.folder / "report", data, **credit)


def write_report(folder: Path, data: ReportData, *, title: str, attribution: str, seed: int) -> None:
    """Write the report of a partition, whole or not at all; replace an earlier one.

    The PNG files and the page are deterministic. The TensorBoard events contain the time.

    Args:
        folder: becomes the report.
        data: the prepared data set.
        title: of the page.
        attribution: credit, printed on the page.
        seed: chooses the measured samples and the images.
    """
    measures = measure(data, seed)
    shown = figures.choose_images(data.clusters[data.thumbnail_rows], data.num_clusters, seed)
    images = figures.draw_charts(data, measures)
    html = _TEMPLATES.get_template("report.html.j2").render(
        title=title,
        attribution=attribution,
        data=data,
        measures=measures,
        images={name: _data_url(png, "png") for name, png in images.items()},
        clusters=[_describe_cluster(data, measures, k, indices) for k, indices in enumerate(shown)],
        broken=sorted(data.broken.items(), key=lambda item: (-item[1], item[0])),
        columns=_column_sizes(data),
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
        "colour": figures.cluster_colours(data.num_clusters)[cluster],
        "count": int(data.counts[cluster]),
        "silhouette": measures.cluster_silhouettes[cluster],
        "neighbours": [(k, distances[k], measures.second_choices[cluster, k]) for k in nearest[:_MAX_NEIGHBOURS]],
        "images": [(_data_url(image, "webp"), text) for image, text in zip(webp, captions, strict=True)],
        "captions": [text for text in dict.fromkeys(captions) if text.strip()][:_MAX_CAPTIONS],
    }


def _column_sizes(data: ReportData) -> list[list[str]]:
    """Disk space of each column: here, for one sample, for 1 million and for the paper's 158 million samples."""
    totals = {**data.column_bytes, "together": sum(data.column_bytes.values())} if data.column_bytes else {}
    scales = [size / data.num_samples for size in (data.num_samples, 1, 1e6, _PAPER_SAMPLES)]
    return [[name, *(amount(num_bytes * scale) for scale in scales)] for name, num_bytes in totals.items()]


def _data_url(image: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def _encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=kind, **options)
    return stream.getvalue()
