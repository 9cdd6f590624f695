"""Tables and figures of the comparison of equal FLOPs, made from its results file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import mean, pstdev
from typing import Any

import numpy as np
from common import Report
from flop_sampling import METHODS
from flop_scores import Point, grouped, mean_kid
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
        self.network, self.other = document["features"]
        self.groups = grouped(map(Point.from_dict, document["points"]))
        self.methods = {method for _, _, method in self.groups}
        compared = {(variant, share) for variant, share, _ in self.groups}
        self.compared = sorted(compared, key=lambda one: (one[0] != "main", one))
        """Variants and shares of the budget; those of the main comparison first."""
        self.shares = [share for variant, share in self.compared if variant == "main"]

    def rows(self, method: str, share: float | None = None, variant: str = "main") -> list[Point]:
        """Points of one method at one budget (the largest by default), one per seed."""
        return self.groups.get((variant, share or self.shares[-1], method), [])

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

        low = self.figures[f"{name}_low"]
        if low <= 0:
            return "–"

        return f"{self.figures[name]:.3f} [{low:.3f}, {self.figures[f'{name}_high']:.3f}]"


def label_of(method: str) -> str:
    """Name of a method or variant as documents write it."""
    return re.sub(r"(top|sample)(\d)", r"\1-\2", method).replace("_", " ")


def mean_score(rows: Sequence[Point], name: str) -> float:
    """Mean of a score over seeds."""
    return mean(point.scores[name] for point in rows)


def tables_of(results: Results) -> list[Report]:
    """All tables that have rows."""
    tables = [strategy_table(results), variant_table(results), loss_table(results), branch_table(results)]
    return [table for table in tables if table.rows]


def strategy_table(results: Results) -> Report:
    """All methods of the main comparison at the largest budget."""
    num_seeds = results.figures["num_seeds"]
    plural = "s" if num_seeds > 1 else ""
    headings = ["method", f"KID ({results.network})", "over monolith", f"KID ({results.other})", "over monolith "]
    headings += ["precision", "recall", "shares TV", "experts per step", "GFLOP per image", "s per image"]
    table = Report(f"Methods at the largest budget, mean of {num_seeds} training seed{plural}", headings)
    for (variant, share, method), rows in results.groups.items():
        if variant != "main" or share != results.shares[-1]:
            continue

        cells = [
            label_of(method),
            f"{mean_kid(rows, results.network):.4f}",
            results.ratio(method),
            f"{mean_kid(rows, results.other):.4f}",
            results.ratio(method, "other_features_"),
        ]
        cells += [f"{mean_score(rows, name):.3f}" for name in ("precision", "recall", "shares_tv")]
        costs = ("experts_per_step", "gflop_per_image", "seconds_per_image")
        cells += [f"{mean_score(rows, name):.3g}" for name in costs]
        table.row(*cells)

    table.note(
        "Ratios are taken under the same kind of solver; brackets hold 95 % bootstrap intervals over seeds and images. "
        f"The clusters were made with {results.network}; {results.other} took no part. Shares TV: total variation "
        "between the clusters' shares among the images and the priors. Seconds are CPU time of one thread. "
        "–: unknown, or one of the two KIDs cannot be told from 0."
    )
    return table


def variant_table(results: Results) -> Report:
    """All budgets and variants: KID of the methods that are sampled everywhere."""
    present = [name for name in CURVES if name in results.methods]
    compared = [name for name in present if not name.startswith("monolith")]
    headings = ["variant", "share of the budget", "seeds", *map(label_of, present)]
    headings += [f"{label_of(name)} over monolith" for name in compared]
    table = Report(f"KID ({results.network}) by variant and budget", headings)
    for variant, share in results.compared:
        num_seeds = 0
        cells = []
        for method in present:
            rows = results.rows(method, share, variant)
            num_seeds = max(num_seeds, len(rows))
            cells.append(f"{mean_kid(rows, results.network):.3f}" if rows else "")

        ratios = [results.ratio(name, f"{variant}_{share:g}_") for name in compared]
        table.row(label_of(variant), f"{share:g}", str(num_seeds), *cells, *ratios)

    return table


def loss_table(results: Results) -> Report:
    """Held-out loss of the monolith and of the experts, wherever both are known for the same seeds."""
    headings = ["variant", "share of the budget", "seeds", "monolith", "experts", "ratio", "ratio at the highest noise"]
    headings += ["router right at the highest noise", "with the condition"]
    table = Report("Held-out loss of the members", headings)
    noisiest = "held_out_loss_at_high_noise"
    for variant, share in results.compared:
        monolith = []
        for row in results.rows("monolith", share, variant):
            if noisiest in row.scores:
                monolith.append(row)

        experts = []
        for row in results.rows("bayes", share, variant):
            if noisiest in row.scores:
                experts.append(row)

        if not monolith or [row.seed for row in monolith] != [row.seed for row in experts]:
            continue

        cells = [f"{mean_score(side, 'held_out_loss'):.4f}" for side in (monolith, experts)]
        for level in ("held_out_loss", noisiest):
            cells.append(f"{mean_score(experts, level) / mean_score(monolith, level):.3f}")

        for accuracy in ("router_accuracy_at_high_noise", "router_accuracy_conditional_at_high_noise"):
            is_known = all(accuracy in row.scores for row in experts)
            cells.append(f"{mean_score(experts, accuracy):.3f}" if is_known else "–")

        table.row(label_of(variant), f"{share:g}", str(len(monolith)), *cells)

    table.note(
        "Each expert is validated on the held-out samples of its own cluster, the monolith on all, both at the centres "
        "of eight equal parts of the time axis. The last of these is the highest noise. How often the router names the "
        "cluster of a held-out sample there, with the condition and without, says how much the condition tells of it."
    )
    return table


def branch_table(results: Results) -> Report:
    """Experts that branched off the monolith against those that did not."""
    headings = ["variant", "branches off at", "share of the budget", "seeds", "method", f"KID ({results.network})"]
    headings += ["over scratch", "over monolith", f"over monolith ({results.other})"]
    table = Report("Experts that branch off the monolith", headings)
    for (variant, share, name), rows in results.groups.items():
        if rows[0].branch_at and name in CURVES:
            prefix = f"{variant}_{share:g}_"
            table.row(
                label_of(variant),
                f"{rows[0].branch_at:g}",
                f"{share:g}",
                str(len(rows)),
                label_of(name),
                f"{mean_kid(rows, results.network):.3f}",
                results.ratio(name, prefix, "scratch"),
                results.ratio(name, prefix),
                results.ratio(name, f"other_features_{prefix}"),
            )

    table.note(
        "Shares are of the full budget. The monolith's FLOPs up to the branch are charged to the experts. "
        "Over scratch: divided by the KID of the main comparison's experts at the same budget and seeds. Over "
        "monolith: by that of its monolith, under the same kind of solver."
    )
    return table


def curves_figure(results: Results) -> Figure:
    """KID against training FLOPs, in all and of the busiest machine; means over seeds with their spread."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    num_islands = int(results.figures["num_clusters"])
    left, right = figure.subplots(1, 2, sharey=True)
    for method in CURVES:
        rows = [row for share in results.shares if (row := results.rows(method, share))]
        if not rows:
            continue

        is_single = method.startswith("monolith")
        flops = np.array([row[0].train_tflop for row in rows])
        kids = []
        for row in rows:
            kids.append([point.kid[results.network].value for point in row])

        for axes, x in ((left, flops), (right, flops if is_single else flops / num_islands)):
            axes.errorbar(
                x,
                list(map(mean, kids)),
                yerr=list(map(pstdev, kids)),
                capsize=3,
                marker="o",
                linestyle="--" if is_single else "-",
                label=label_of(method),
            )

    left.set(xscale="log", yscale="log", xlabel="training TFLOPs, router and partition included")
    left.set_ylabel(f"KID ({results.network}), lower is better")
    right.set(xscale="log", xlabel=f"training TFLOPs per machine: {num_islands} islands, or one monolith")
    for axis in (left.xaxis, right.xaxis, left.yaxis):
        axis.set_major_locator(LogLocator(base=2))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())

    left.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 7, 8)))
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.3)

    left.legend(fontsize=8, title="bars: std over seeds" if results.figures["num_seeds"] > 1 else None)
    return figure
