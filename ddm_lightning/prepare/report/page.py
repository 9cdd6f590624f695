"""The report as one HTML page that needs nothing but itself: no network, no scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from ddm_lightning.prepare.partition_cost import partition_cost
from ddm_lightning.prepare.report.data import ReportData
from ddm_lightning.prepare.report.figures import cluster_colours
from ddm_lightning.prepare.report.markup import (
    chart,
    data_url,
    escape,
    table,
    text_of,
    thumbnail,
)
from ddm_lightning.prepare.report.measures import Measures
from ddm_lightning.prepare.report.style import STYLE
from ddm_lightning.units import amount, duration, operations

_NEIGHBOURS = 3
_CAPTIONS = 8
_RATES, _DISK = (100.0, 10_000.0), 1.0  # of the cost model: GFLOP/s, GB/s
_FEW = 0.05
_SCALES = (("for 1 M", 1e6), ("for 158 M", 158e6))
# Whatever a caption may bring in, the page loads and runs nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Charts:
    """PNG bytes of each chart, in light and in dark, and of the map of pictures; what cannot be drawn is left out."""

    light: Mapping[str, bytes]
    dark: Mapping[str, bytes]
    picture_map: bytes | None


def page(
    data: ReportData,
    measures: Measures,
    charts: Charts,
    shown: Sequence[Int64[np.ndarray, "shown"]],
    *,
    title: str,
    attribution: str,
) -> str:
    """The whole page.

    Args:
        data: what was prepared.
        measures: of its partition.
        charts: pictures of the measures.
        shown: for each cluster, the thumbnails that stand for it.
        title: of the page.
        attribution: credit, at its foot.
    """
    clusters = "".join(_cluster(data, measures, k, shown[k]) for k in range(data.num_clusters))
    credit = f"<footer>{escape(attribution)}</footer>\n" if attribution else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<header><h1>{escape(title)}</h1>\n<p>{_summary(data, measures)}</p></header>\n"
        f'<main>\n<div class="pair">{_key_figures(data, measures)}{_overview(data, measures)}</div>\n'
        f"<h2>How the clusters lie</h2>\n{_charts(measures, charts)}"
        f"<h2>The clusters</h2>\n{clusters}"
        f"<h2>Samples left out</h2>\n{_broken(data)}{_costs(data)}{_kmeans_cost(data)}</main>\n"
        f"{credit}</body>\n</html>\n"
    )


def _summary(data: ReportData, measures: Measures) -> str:
    text = f"{data.num_samples:,} samples in {data.num_clusters:,} cluster{'s' * (data.num_clusters > 1)}"
    if data.num_clusters == 1:
        return f"{text}: there is nothing to tell apart."
    mean = float(np.mean(measures.silhouettes))
    apart = "well apart" if mean > 0.5 else "apart" if mean > 0.25 else "close to one another" if mean > 0 else "mixed"
    if math.isnan(mean):
        return f"{text}."
    return (
        f"{text}; the largest holds {_largest_over_mean(data):.3f} times the mean. "
        f"By their features the clusters are {apart} (mean silhouette {mean:.3f})."
    )


def _key_figures(data: ReportData, measures: Measures) -> str:
    left_out = sum(data.broken.values())
    drawn = "drawn evenly" if len(measures.rows) < data.num_samples else "all of them"
    rows = [(escape(name), text_of(value)) for name, value in data.facts.items()]
    rows += [
        ("samples read", f"{data.num_read:,}"),
        ("left out", f"{left_out:,} ({left_out / max(1, data.num_read):.2%})"),
        ("samples prepared", f"{data.num_samples:,}"),
        ("without a caption", f"{data.num_without_caption:,} ({data.num_without_caption / data.num_samples:.2%})"),
        *([("for other experts, too", f"{data.num_out_of_cluster:,} samples")] if data.num_out_of_cluster else []),
        ("clusters", f"{data.num_clusters:,}"),
        ("largest over mean", f"{_largest_over_mean(data):.3f}"),
        ("smallest over mean", f"{data.counts.min() / data.counts.mean():.3f}"),
        *([("displaced", _displaced(*data.displaced))] if data.displaced else []),
        ("distance", "cosine" if data.metric == "spherical" else "Euclidean"),
        ("feature", f"{data.features.row_shape[0]:,} numbers"),
        ("mean silhouette", _number(float(np.mean(measures.silhouettes)))),
        ("measured on", f"{len(measures.rows):,} samples, {drawn}"),
    ]
    return f'<div class="card facts"><h3>Key figures</h3>{table(["", ""], rows, texts=2)}</div>\n'


def _displaced(fraction: float, by_balance: float) -> str:
    return (
        f"{fraction:.1%} of the samples are nearer to another cluster's mean: {by_balance:.1%} because clusters are "
        f"balanced, {fraction - by_balance:.1%} because each fine cell goes to a cluster as a whole"
    )


def _overview(data: ReportData, measures: Measures) -> str:
    rows = []
    for k, count in enumerate(data.counts):
        nearest = _nearest(measures, k)
        rows.append(
            [
                f'<span class="together">{_swatch(data, k)}<a href="#cluster-{k}">cluster {k}</a></span>',
                f"{count:,}",
                f"{count / data.num_samples:.1%}",
                _number(measures.cluster_silhouettes[k]),
                f'<a href="#cluster-{nearest[0]}">{nearest[0]}</a>' if nearest else "–",
            ]
        )
    head = ["", "samples", "share", "silhouette", "nearest"]
    return f'<div class="card"><h3>Clusters</h3>{table(head, rows)}</div>\n'


def _charts(measures: Measures, charts: Charts) -> str:
    first, second = measures.projection.explained
    legends = {
        "sizes": (
            "Samples in each cluster.",
            "Each cluster trains one expert: even sizes give the experts even amounts of data.",
        ),
        "silhouette": (
            "Silhouette of each sample.",
            "1: much nearer to its own cluster than to any other; 0: between two; below 0: nearer to another. "
            "Balanced clusters of rich data often lie near 0.",
        ),
        "neighbours": (
            "Matrix of second-nearest clusters.",
            "Row: a cluster. Column: the share of its samples whose nearest centroid, its own left out, is that one. "
            "Experts of such neighbours model similar pictures.",
        ),
        "map": (
            "Map of the samples, coloured by cluster.",
            f"The two principal components show {first + second:.0%} of the variance: clusters that overlap here may "
            "be apart in other directions.",
        ),
    }
    figures = "".join(
        chart(charts.light[name], charts.dark[name], alt, caption)
        for name, (alt, caption) in legends.items()
        if name in charts.light
    )
    text = f'<div class="pair">{figures}</div>\n'
    if charts.picture_map is not None:
        text += (
            '<figure class="card" style="margin: 1rem 0 0"><h3>Pictures in the plane of most variance</h3>'
            f'<img src="{data_url(charts.picture_map)}" style="max-width: 60rem" '
            'alt="Pictures where they lie on the map."><figcaption>Pictures where they lie on the map, framed in the '
            "colour of their cluster.</figcaption></figure>\n"
        )
    return text


def _cluster(data: ReportData, measures: Measures, cluster: int, shown: Int64[np.ndarray, "shown"]) -> str:
    count = int(data.counts[cluster])
    facts = [
        f"{count:,} sample{'s' * (count != 1)}",
        f"{count / data.num_samples:.1%} of all",
        f"{count / data.counts.mean():.3f} times the mean",
        f"silhouette {_number(measures.cluster_silhouettes[cluster])}",
    ]
    near = [
        f'<a href="#cluster-{k}">cluster {k}</a> (distance {measures.centroid_distances[cluster, k]:.3f}, '
        f"second choice of {_percent(measures.second_choices[cluster, k])})"
        for k in _nearest(measures, cluster)[:_NEIGHBOURS]
    ]
    text = f"<p>{' · '.join(facts)}</p>\n"
    if near:
        text += f'<p class="pale">Nearest by centroid: {"; ".join(near)}</p>\n'
    captions = [data.captions[i] for i in shown] if data.captions else [""] * len(shown)
    if len(shown):
        pictures = "\n".join(thumbnail(data.thumbnails[i], caption) for i, caption in zip(shown, captions, strict=True))
        text += f'<div class="pictures">{pictures}</div>\n'
    else:
        text += '<p class="pale">None of its pictures is among those kept for this report.</p>\n'
    told = [caption for caption in dict.fromkeys(captions) if caption.strip()][:_CAPTIONS]
    if told:
        text += f'<ul class="captions">{"".join(f"<li>{text_of(caption)}</li>" for caption in told)}</ul>\n'
    return (
        f'<section class="card" id="cluster-{cluster}"><h3>{_swatch(data, cluster)}Cluster {cluster}</h3>\n'
        f"{text}</section>\n"
    )


def _broken(data: ReportData) -> str:
    if not data.broken:
        return '<p class="pale">None: every sample of the source could be read.</p>\n'
    causes = sorted(data.broken.items(), key=lambda item: (-item[1], item[0]))
    rows = [(text_of(cause), f"{num:,}", f"{num / max(1, data.num_read):.2%}") for cause, num in causes]
    return f'<div class="card">{table(["cause", "samples", "of all read"], rows)}</div>\n'


def _costs(data: ReportData) -> str:
    seconds = {name: cost.seconds for name, cost in data.costs.items() if cost.seconds is not None}
    sizes = {name: float(cost.num_bytes) for name, cost in data.costs.items() if cost.num_bytes is not None}
    cards = "".join(
        f'<div class="card"><h3>{title}</h3>{_extrapolated(values, data.num_samples, show)}</div>\n'
        for title, values, show in (("Time", seconds, duration), ("Disk", sizes, amount))
        if values
    )
    if not cards:
        return ""
    workers = ", with the workers that this run had; N machines like it take an Nth of the time" if seconds else ""
    return (
        f'<h2>What it cost</h2>\n<div class="pair">{cards}</div>\n<p class="pale">Extrapolated in proportion to the '
        f"number of samples{workers}. 158 million samples are what the paper trained on (arXiv 2501.05450).</p>\n"
    )


def _kmeans_cost(data: ReportData) -> str:
    """Work and time of the partition by the model of ``partition_cost``, here and on the paper's data set."""
    if data.kmeans is None:
        return ""
    settings = data.kmeans
    (dim,) = data.features.row_shape
    paper, fitted = (158_000_000, 1024), f"158 M × 1,024, fitted on {settings.fit_fraction:.0%} of them"
    sizes = [("here", data.num_samples, dim, settings.fit_fraction), (fitted, *paper, settings.fit_fraction)]
    if settings.fit_fraction > _FEW:
        sizes.append((f"158 M × 1,024, fitted on {_FEW:.0%} of them", *paper, _FEW))
    rows = []
    for name, num, width, fraction in sizes:
        costs = [
            partition_cost(
                num,
                width,
                settings.num_fine,
                settings.iterations,
                gflops,
                _DISK,
                fit_fraction=fraction,
                bytes_per_number=data.features.row_bytes // dim,
            )
            for gflops in _RATES
        ]
        times = (duration(cost.seconds) for cost in costs)
        rows.append([name, operations(costs[0].flops), amount(costs[0].bytes), *times])
    head = ["samples × features", "work", "read", *(f"at {operations(gflops * 1e9)}/s" for gflops in _RATES)]
    return (
        "<h2>What a partition costs, here and at the size of the paper</h2>\n"
        f'<div class="card">{table(head, rows)}</div>\n<p class="pale">A model, not a measurement: '
        f"{settings.iterations} passes over the fitted samples and one over all, each a product with "
        f"{settings.num_fine:,} fine centroids, and features read at {_DISK:g} GB/s. benchmarks/partition.py "
        "measures the rate of a machine.</p>\n"
    )


def _extrapolated(values: Mapping[str, float], num_samples: int, show: Callable[[float], str]) -> str:
    rows = []
    for name, value in (*values.items(), ("together", sum(values.values()))):
        one = value / max(1, num_samples)
        rows.append([text_of(name), show(value), show(one), *(show(one * scale) for _, scale in _SCALES)])
    return table(["", "here", "a sample", *(name for name, _ in _SCALES)], rows)


def _nearest(measures: Measures, cluster: int) -> list[int]:
    """Other clusters, the nearest centroid first."""
    order = np.argsort(measures.centroid_distances[cluster], kind="stable")
    return [int(k) for k in order if k != cluster]


def _largest_over_mean(data: ReportData) -> float:
    return float(data.counts.max() / data.counts.mean())


def _swatch(data: ReportData, cluster: int) -> str:
    red, green, blue = (round(255 * part) for part in cluster_colours(data.num_clusters)[cluster])
    return f'<span class="swatch" style="background: #{red:02x}{green:02x}{blue:02x}"></span>'


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"
