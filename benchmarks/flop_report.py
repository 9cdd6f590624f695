"""Tables, figures and page of the comparison of equal FLOPs, made from its results file."""

from __future__ import annotations

import base64
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
from common import Report, save_figure
from flop_sampling import METHODS
from jaxtyping import UInt8
from jinja2 import Template
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

CURVES = [method.name for method in METHODS if method.curve]
"""Methods that are sampled at every budget."""


class Results:
    """The contents of a results file.

    Args:
        document: commit, device, command, figures, points and ``features``: the clustering network and the other one.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.figures = document["figures"]
        self.points = document["points"]
        self.network, self.other = document["features"]
        self.largest = max(point["share"] for point in self.points if point["variant"] == "main")

    def rows(self, method: str, share: float | None = None, variant: str = "main") -> list[dict[str, Any]]:
        """Points of one method at one budget (the largest by default), one per seed."""
        wanted = (variant, method, self.largest if share is None else share)
        return [point for point in self.points if (point["variant"], point["method"], point["share"]) == wanted]

    def kid(self, method: str, share: float | None = None, variant: str = "main", network: str = "") -> list[float]:
        """KID of each seed; empty if a seed was scored before the network was in use."""
        rows, network = self.rows(method, share, variant), network or self.network
        return [row["kid"][network]["value"] for row in rows] if all(network in row["kid"] for row in rows) else []

    def compared(self) -> list[tuple[str, float]]:
        """Variants and shares of the budget; those of the main comparison first."""
        found = {(point["variant"], point["share"]) for point in self.points}
        return sorted(found, key=lambda one: (one[0] != "main", one))

    def ratio(self, method: str, prefix: str = "", over: str = "monolith") -> str:
        """KID over the monolith's with its interval; empty for the monolith itself, a dash if the interval reaches 0.

        Args:
            method: the compared method.
            prefix: ``other_features_``, the variant and share of the budget, ``VARIANT_SHARE_``, or both.
            over: ``scratch`` for the ratio to experts that did not branch off.
        """
        name = f"{prefix}{method}_over_{over}"
        if name not in self.figures:
            return ""
        value, low, high = (self.figures[f"{name}{end}"] for end in ("", "_low", "_high"))
        return f"{value:.3f} [{low:.3f}, {high:.3f}]" if low > 0 else "–"


def label_of(method: str) -> str:
    """Name of a method as documents write it."""
    return re.sub(r"(top|sample)(\d)", r"\1-\2", method).replace("_", " ")


def strategy_table(results: Results) -> Report:
    """All methods of the main comparison at the largest budget."""
    num_seeds = results.figures["num_seeds"]
    table = Report(
        f"Methods at the largest budget, mean of {num_seeds} training seed{'s' if num_seeds > 1 else ''}",
        [
            "method",
            f"KID ({results.network})",
            "over monolith",
            f"KID ({results.other})",
            "over monolith ",
            "precision",
            "recall",
            "shares TV",
            "experts per step",
            "GFLOP per image",
            "s per image",
        ],
    )
    main = [point for point in results.points if point["variant"] == "main"]
    for method in dict.fromkeys(point["method"] for point in main):
        rows = results.rows(method)
        other = results.kid(method, network=results.other)
        cells = [mean(row[key] for row in rows) for key in ("precision", "recall", "shares_tv")]
        cost = [mean(row[key] for row in rows) for key in ("experts_per_step", "gflop_per_image", "seconds_per_image")]
        table.row(
            label_of(method),
            f"{mean(results.kid(method)):.4f}",
            results.ratio(method),
            f"{mean(other):.4f}" if other else "–",
            results.ratio(method, "other_features_"),
            *(f"{value:.3f}" for value in cells),
            *(f"{value:.3g}" for value in cost),
        )
    table.note(
        "Ratios are taken under the same kind of solver; brackets hold 95 % bootstrap intervals over seeds and images. "
        f"The clusters were made with {results.network}; {results.other} took no part. Shares TV: total variation "
        "between the clusters' shares among the images and the priors. Seconds are CPU time of one thread. "
        "–: unknown, or one of the two KIDs cannot be told from 0."
    )
    return table


def variant_table(results: Results) -> Report:
    """All budgets and variants: KID of the methods that are sampled everywhere."""
    present = [name for name in CURVES if any(point["method"] == name for point in results.points)]
    compared = [name for name in present if not name.startswith("monolith")]
    headings = ["variant", "share of the budget", "seeds", *map(label_of, present)]
    headings += [f"{label_of(name)} over monolith" for name in compared]
    table = Report(f"KID ({results.network}) by variant and budget", headings)
    for variant, share in results.compared():
        found = [results.kid(method, share, variant) for method in present]
        cells = [f"{mean(values):.3f}" if values else "" for values in found]
        ratios = [results.ratio(name, f"{variant}_{share:g}_") for name in compared]
        table.row(variant.replace("_", " "), f"{share:g}", str(max(map(len, found))), *cells, *ratios)
    return table


def loss_table(results: Results) -> Report:
    """Held-out loss of the monolith and of the experts, wherever both are known for the same seeds."""
    table = Report(
        "Held-out loss of the members",
        [
            *("variant", "share of the budget", "seeds", "monolith", "experts", "ratio", "ratio at the highest noise"),
            *("router right at the highest noise", "with the condition"),
        ],
    )
    levels = ("held_out_loss", "held_out_loss_at_high_noise")
    for variant, share in results.compared():
        sides = [
            {row["seed"]: row for row in results.rows(method, share, variant) if levels[-1] in row}
            for method in ("monolith", "bayes")
        ]
        if not sides[0] or sides[0].keys() != sides[1].keys():
            continue
        means = [[mean(row[level] for row in side.values()) for side in sides] for level in levels]
        losses = [f"{value:.4f}" for value in means[0]]
        ratios = [f"{experts / monolith:.3f}" for monolith, experts in means]
        accuracies = [
            f"{mean(row[name] for row in sides[1].values()):.3f}"
            if all(name in row for row in sides[1].values())
            else "–"
            for name in ("router_accuracy_at_high_noise", "router_accuracy_conditional_at_high_noise")
        ]
        table.row(variant.replace("_", " "), f"{share:g}", str(len(sides[0])), *losses, *ratios, *accuracies)
    table.note(
        "Each expert is validated on the held-out samples of its own cluster, the monolith on all, both at the centres "
        "of eight equal parts of the time axis. The last of these is the highest noise. How often the router names the "
        "cluster of a held-out sample there, with the condition and without, says how much the condition tells of it."
    )
    return table


def branch_table(results: Results) -> Report:
    """Experts that branched off the monolith against those that did not."""
    branched = [point for point in results.points if point.get("branch_at")]
    methods = [name for name in CURVES if any(point["method"] == name for point in branched)]
    table = Report(
        "Experts that branch off the monolith",
        [
            "variant",
            "branches off at",
            "share of the budget",
            "seeds",
            "method",
            f"KID ({results.network})",
            "over scratch",
            "over monolith",
            f"over monolith ({results.other})",
        ],
    )
    keys = ("variant", "branch_at", "share")
    for variant, at, share in dict.fromkeys(tuple(point[key] for key in keys) for point in branched):
        prefix = f"{variant}_{share:g}_"
        for name in methods:
            if kids := results.kid(name, share, variant):
                ratios = [results.ratio(name, prefix, over) for over in ("scratch", "monolith")]
                other = results.ratio(name, f"other_features_{prefix}")
                first = (variant.replace("_", " "), f"{at:g}", f"{share:g}", str(len(kids)), label_of(name))
                table.row(*first, f"{mean(kids):.3f}", *ratios, other)
    table.note(
        "Shares are of the full budget. The monolith's FLOPs up to the branch are charged to the experts. "
        "Over scratch: divided by the KID of the main comparison's experts at the same budget and seeds. Over "
        "monolith: by that of its monolith, under the same kind of solver."
    )
    return table


def curves_figure(results: Results) -> Figure:
    """KID against training FLOPs, in all and of the busiest machine; means over seeds with their spread."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    islands = int(results.figures["num_clusters"])
    left, right = figure.subplots(1, 2, sharey=True)
    main = [point for point in results.points if point["variant"] == "main"]
    for method in CURVES:
        budgets = sorted({point["share"] for point in main if point["method"] == method})
        if not budgets:
            continue
        values = [results.kid(method, share) for share in budgets]
        flops = np.array([results.rows(method, share)[0]["train_tflop"] for share in budgets])
        is_single = method.startswith("monolith")
        style = {"marker": "o", "linestyle": "--" if is_single else "-", "label": label_of(method)}
        for axes, x in ((left, flops), (right, flops if is_single else flops / islands)):
            axes.errorbar(x, [mean(v) for v in values], yerr=[pstdev(v) for v in values], capsize=3, **style)
    left.set(xscale="log", yscale="log", xlabel="training TFLOPs, router and partition included")
    left.set_ylabel(f"KID ({results.network}), lower is better")
    right.set(xscale="log", xlabel=f"training TFLOPs per machine: {islands} islands, or one monolith")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7, 8)))
    for axis in (left.xaxis, right.xaxis):
        axis.set_major_locator(LogLocator(base=2))
    for axis in (left.xaxis, right.xaxis, left.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.3)
    left.legend(fontsize=8, title="bars: std over seeds" if results.figures["num_seeds"] > 1 else None)
    return figure


def strips_figure(images: Mapping[str, UInt8[np.ndarray, "n h w 3"]], attribution: str, num: int = 16) -> Figure:
    """One strip of images per method, from the same noise."""
    names = list(images)
    _, height, _, _ = images[names[0]].shape
    figure = Figure(figsize=(2.6 + num * 0.6, len(names) * 0.62 + 0.5), layout="constrained")
    axes = figure.subplots()
    gap = ((1, 1), (1, 1), (0, 0))
    rows = [np.concatenate([np.pad(one, gap, constant_values=255) for one in images[n][:num]], 1) for n in names]
    axes.imshow(np.concatenate(rows), interpolation="nearest")
    centres = (np.arange(len(names)) + 0.5) * (height + 2)
    axes.set_yticks(centres, list(map(label_of, names)))
    axes.set_xticks([])
    axes.set_xlabel(textwrap.fill(attribution, 300), fontsize=4)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


_PAGE = Template(
    """<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;
text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}small{color:#666}</style>
<h1>{{ title }}</h1>
{% for table in tables %}<h2>{{ table.title }}</h2>
<table><tr>{% for heading in table.headings %}<th>{{ heading|e }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell|e }}</td>{% endfor %}</tr>{% endfor %}</table>
{% for note in table.notes %}<p>{{ note|e }}</p>{% endfor %}
{% endfor %}
{% for caption, source in figures %}<h2>{{ caption|e }}</h2><img alt="{{ caption|e }}" src="{{ source }}">{% endfor %}
<p><small>{{ attribution|e }}</small></p><p><small>{{ origin|e }}</small></p></html>
""",
    autoescape=False,
)


def page(title: str, tables: Sequence[Any], figures: Mapping[str, Figure], attribution: str, origin: str) -> str:
    """A self-contained HTML page of tables and figures."""
    sources = []
    for caption, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        sources.append((caption, "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()))
    return _PAGE.render(title=title, tables=tables, figures=sources, attribution=attribution, origin=origin)


def write_figures(folder: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Write each figure as PNG, named after its caption."""
    paths = []
    for caption, figure in figures.items():
        path = folder / f"{caption.split(':')[0].lower().replace(' ', '_')}.png"
        save_figure(path, figure)
        paths.append(path)
    return paths
