"""The report as one HTML page that needs nothing but itself: no network, no scripts."""

from __future__ import annotations

import base64
import html
import io
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image

from ddm_lightning.core.formatting import amount, duration, operations
from ddm_lightning.partition.build import partition_cost
from ddm_lightning.prepare.report.figures import cluster_colours
from ddm_lightning.prepare.report.measures import Measures, ReportData

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


CAPTION_LENGTH = 120
_JOINERS = "\u200d\ufe0e\ufe0f"


def escape(text: str) -> str:
    """Text as HTML, quotes included; what is no Unicode becomes a question mark."""
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def shorten(text: str, length: int = CAPTION_LENGTH) -> str:
    """One line of at most ``length`` characters, without control characters, ended with dots where it was cut."""
    # A caption may be a book; and a run of spaces may be long, too.
    start = text[: 8 * length]
    line = " ".join("".join(c if unicodedata.category(c) != "Cc" else " " for c in start).split())
    if len(line) <= length and len(start) == len(text):
        return line
    line = line[:length]
    # Half a family of joined emoji, or a letter without its accents, is better than a dangling joiner.
    while line and (line[-1] in _JOINERS or line[-1].isspace()):
        line = line[:-1]
    return line + "…"


def text_of(text: str) -> str:
    """A text of strangers, shortened and escaped; whatever direction it is written in stays inside it."""
    return f"<bdi>{escape(shorten(text))}</bdi>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first ``texts`` columns are text and whose others are numbers.

    Cells are HTML; headings are texts, all empty for none.
    """
    kinds = ["" if column < texts else ' class="number"' for column in range(len(head))]
    top = "".join(f'<th scope="col"{kind}>{escape(text)}</th>' for text, kind in zip(head, kinds, strict=True))
    body = ""
    for first, *others in rows:
        cells = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=True))
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>\n'
    thead = f"<thead><tr>{top}</tr></thead>\n" if any(head) else ""
    return f'<div class="wide"><table>\n{thead}<tbody>\n{body}</tbody>\n</table></div>\n'


def chart(light: bytes, dark: bytes, alt: str, caption: str) -> str:
    """A figure in two versions, of which the page's colours choose."""
    return (
        '<figure class="card"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{data_url(dark)}">'
        f'<img src="{data_url(light)}" alt="{escape(alt)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def thumbnail(picture: UInt8[np.ndarray, "s s 3"], caption: str) -> str:
    """A small picture; its caption shows when pointed at."""
    text = escape(shorten(caption))
    title = f' title="{text}"' if text else ""
    return f'<img src="{data_url(picture_bytes(picture))}" alt="{text}"{title} loading="lazy">'


def picture_bytes(picture: UInt8[np.ndarray, "s s 3"]) -> bytes:
    """PNG or JPEG, whichever is smaller: drawings take the one, photographs the other."""
    image = Image.fromarray(np.ascontiguousarray(picture))
    png, jpeg = io.BytesIO(), io.BytesIO()
    image.save(png, format="PNG", optimize=True)
    image.save(jpeg, format="JPEG", quality=88)
    return min(png.getvalue(), jpeg.getvalue(), key=len)


def data_url(image: bytes) -> str:
    """PNG or JPEG bytes as a URL that needs no network."""
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --pale: #5c6470; --paper: #ffffff; --page: #f4f5f7;
  --line: #dfe3e8; --accent: #2c64c6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --pale: #a0a8b4; --paper: #1b1e23;
  --page: #121417; --line: #343a43; --accent: #6fa0f5; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 75rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .75rem; }
section > h3, .card > h3 { font-size: 1.05rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 48rem; }
header p { max-width: none; }
a { color: var(--accent); }
.pale, figcaption, footer { color: var(--pale); font-size: .875rem; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: .5rem; padding: 1rem;
  margin: 0 0 1rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.pair > * { margin: 0; min-width: 0; }
figure img { display: block; width: 100%; max-width: 40rem; height: auto; margin: 0 auto; }
figcaption { margin-top: .5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
thead th { color: var(--pale); font-weight: 600; font-size: .8125rem; }
tbody th { font-weight: 500; }
.facts tbody th { min-width: 9.5rem; }
.pair + p { margin-top: .75rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.together { white-space: nowrap; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(3.5rem, 1fr)); gap: .25rem;
  margin: .75rem 0; }
.pictures img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: .25rem;
  background: #ffffff; }
.captions { margin: .25rem 0 0; padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: .35rem; }
.captions li { border: 1px solid var(--line); border-radius: .25rem; padding: .05rem .45rem; font-size: .8125rem;
  max-width: 100%; }
.swatch { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
@media (max-width: 32rem) { .card { padding: .75rem; } table { font-size: .875rem; }
  th, td { padding-right: .45rem; } thead th { font-size: .75rem; } th:last-child, td:last-child { padding-right: 0; } }
footer { margin-top: 2rem; }
"""
