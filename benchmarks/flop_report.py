"""Tables and figures of the comparison of equal FLOPs, made from its results file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from operator import itemgetter
from statistics import mean, pstdev
from typing import Any

import numpy as np
from common import Report
from flop_sampling import COSTS, METHODS
from flop_scores import LOSS, Interval, Point, baseline_of, grouped, kids_of, mean_kid, mean_score, shares_of
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

CURVES = [method.name for method in METHODS if method.curve]
"""Methods that are sampled at every budget."""
_NOISIEST = "held_out_loss_at_high_noise"


class Results:
    """The contents of a results file.

    Args:
        document: commit, device, command, figures, points and ``features``: the clustering network and the other one.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.figures = document["figures"]
        self.network, self.other = document["features"]
        self.groups = grouped(map(Point.from_dict, document["points"]))
        self.compared = sorted({key[:2] for key in self.groups})
        """Variants and shares of the budget."""
        self.shares = shares_of(self.groups)

    def rows(self, method: str, share: float | None = None, variant: str = "main") -> list[Point]:
        """Points of one method at one budget (the largest by default), one per seed."""
        return self.groups.get((variant, share or self.shares[-1], method), [])

    def ratio(self, method: str, prefix: str = "", over: str = "monolith") -> str:
        """KID over the monolith's with its interval; empty for the monolith itself.

        Args:
            method: the compared method.
            prefix: ``other_features_``, the variant and share of the budget, ``VARIANT_SHARE_``, or both.
            over: ``scratch`` for the ratio to experts that did not branch off.
        """
        return str(self.interval(f"{prefix}{method}_over_{over}") or "")

    def interval(self, name: str) -> Interval | None:
        """A figure with its interval; None if there is none."""
        if name not in self.figures:
            return None

        return Interval(*itemgetter(name, f"{name}_low", f"{name}_high")(self.figures))

    def gain(self, method: str, share: float, variant: str, prefix: str = "") -> Interval | None:
        """``ratio`` at one budget of a variant; older results have some without bounds, or none."""
        found = self.interval(f"{prefix}{variant}_{share:g}_{method}_over_monolith")
        if not found and (variant, share) == ("main", self.shares[-1]):
            found = self.interval(f"{prefix}{method}_over_monolith")

        sides = [self.rows(method, share, variant), self.rows(baseline_of(method), share, variant)]
        if found or prefix or not all(sides):
            return found

        ours, theirs = [mean_kid(rows, self.network) for rows in sides]
        return Interval(ours / theirs)

    def loss_ratio(self, share: float, variant: str, level: str = LOSS) -> str:
        """Held-out loss of the experts over the monolith's; a dash unless both are known for the same seeds."""
        sides = []
        for method in ("bayes", "monolith"):
            rows = [row for row in self.rows(method, share, variant) if _NOISIEST in row.scores]
            sides.append({row.seed: row.scores[level] for row in rows})

        experts, monolith = sides
        if not experts or experts.keys() != monolith.keys():
            return "–"

        return f"{mean(experts.values()) / mean(monolith.values()):.3f}"


def label_of(method: str) -> str:
    """Name of a method or variant as documents write it."""
    return re.sub(r"(top|sample)(\d)", r"\1-\2", method).replace("_", " ")


def tables_of(results: Results) -> list[Report]:
    """All tables that have rows."""
    tables = [strategy_table(results), variant_table(results)]
    losses = loss_table(results)
    if losses.rows:
        tables.append(losses)

    return tables


def strategy_table(results: Results) -> Report:
    """All methods of the main comparison at the largest budget."""
    headings = ["method", f"KID ({results.network})", "over monolith", f"KID ({results.other})", "over monolith "]
    headings += ["precision", "recall", "shares TV", "experts per step", "GFLOP per image", "s per image"]
    scores = ("precision", "recall", "shares_tv", *COSTS)
    table = Report(f"Methods at the largest budget, mean over {results.figures['num_seeds']} training seeds", headings)
    for (variant, share, method), rows in results.groups.items():
        if variant == "main" and share == results.shares[-1]:
            cells = [f"{mean_kid(rows, results.network):.4f}", results.ratio(method)]
            cells += [f"{mean_kid(rows, results.other):.4f}", results.ratio(method, "other_features_")]
            cells += [f"{mean_score(rows, name):.3g}" for name in scores]
            table.row(label_of(method), *cells)

    table.note(
        "Ratios are taken under the same kind of solver; brackets hold 95 % bootstrap intervals over seeds and images. "
        f"The clusters were made with {results.network}; {results.other} took no part. Shares TV: total variation "
        "between the clusters' shares among the images and the priors. Seconds are CPU time of one thread. "
        "–: unknown, or one of the two KIDs cannot be told from 0."
    )
    return table


def variant_table(results: Results) -> Report:
    """All budgets and variants: KID of the methods that are sampled everywhere."""
    headings = ["variant", "share of the budget", "seeds", "method", f"KID ({results.network})"]
    headings += ["over monolith", f"over monolith ({results.other})", "over scratch"]
    table = Report("KID by variant and budget", headings)
    for variant, share in results.compared:
        for method in CURVES:
            rows = results.rows(method, share, variant)
            if rows:
                prefix = f"{variant}_{share:g}_"
                ratios = [
                    results.ratio(method, prefix),
                    results.ratio(method, f"other_features_{prefix}"),
                    results.ratio(method, prefix, "scratch"),
                ]
                cells = [label_of(variant), f"{share:g}", str(len(rows)), label_of(method)]
                table.row(*cells, f"{mean_kid(rows, results.network):.3f}", *ratios)

    table.note(
        "Experts that branch off the monolith are charged its FLOPs up to the branch. Over scratch: divided by the KID "
        "of the main comparison's experts at the same budget and seeds."
    )
    return table


def loss_table(results: Results) -> Report:
    """Held-out loss of the monolith and of the experts, wherever both are known for the same seeds."""
    headings = ["variant", "share of the budget", "seeds", "monolith", "experts", "ratio", "ratio at the highest noise"]
    headings += ["router right at the highest noise", "with the condition"]
    table = Report("Held-out loss of the members", headings)
    for variant, share in results.compared:
        ratios = [results.loss_ratio(share, variant, level) for level in (LOSS, _NOISIEST)]
        if "–" in ratios:
            continue

        experts = results.rows("bayes", share, variant)
        cells = [f"{mean_score(side, LOSS):.4f}" for side in (results.rows("monolith", share, variant), experts)]
        cells += ratios
        for accuracy in ("router_accuracy_at_high_noise", "router_accuracy_conditional_at_high_noise"):
            try:
                cells.append(f"{mean_score(experts, accuracy):.3f}")
            except KeyError:
                cells.append("–")

        table.row(label_of(variant), f"{share:g}", str(len(experts)), *cells)

    table.note(
        "Each expert is validated on the held-out samples of its own cluster, the monolith on all, both at the centres "
        "of eight equal parts of the time axis. The last of these is the highest noise. How often the router names the "
        "cluster of a held-out sample there, with the condition and without, says how much the condition tells of it."
    )
    return table


def powers_of_two(axis: Axis) -> None:
    """Label a logarithmic axis at powers of two."""
    axis.set_major_locator(LogLocator(base=2))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def curves_figure(results: Results) -> Figure:
    """KID against training FLOPs, in all and of the busiest machine; means over seeds with their spread."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    num_islands = int(results.figures["num_clusters"])
    left, right = figure.subplots(1, 2, sharey=True)
    for method in CURVES:
        is_single = method.startswith("monolith")
        flops = []
        means = []
        spreads = []
        for share in results.shares:
            rows = results.rows(method, share)
            if rows:
                flops.append(rows[0].train_tflop)
                kids = [kid.value for kid in kids_of(rows, results.network)]
                means.append(mean(kids))
                spreads.append(pstdev(kids))

        style = {"capsize": 3, "marker": "o", "linestyle": "--" if is_single else "-", "label": label_of(method)}
        if flops:
            left.errorbar(flops, means, spreads, **style)
            right.errorbar(np.divide(flops, 1 if is_single else num_islands), means, spreads, **style)

    left.set(xscale="log", yscale="log", xlabel="training TFLOPs, router and partition included")
    left.set_ylabel(f"KID ({results.network}), lower is better")
    right.set(xscale="log", xlabel=f"training TFLOPs per machine: {num_islands} islands, or one monolith")
    for axis in (left.xaxis, right.xaxis, left.yaxis):
        powers_of_two(axis)

    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7, 8)))
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.3)

    left.legend(fontsize=8, title="bars: std over seeds" if results.figures["num_seeds"] > 1 else None)
    return figure
