"""Table, lines and charts of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from ddm_lightning.core.files import atomic_write
from ddm_lightning.core.grids import heat_map


def write_figures(folder: Path, figures: Mapping[str, Any]) -> None:
    """Draw ``experts.png``, ``router.png`` (with a router) and ``shares.png``."""
    charts = {"experts": _experts(figures), "shares": _shares(figures)}
    if figures["router"]:
        charts["router"] = _router(figures)
    for name, figure in charts.items():
        atomic_write(folder / f"{name}.png", partial(figure.savefig, format="png", dpi=120))


def diagnosis_table(figures: Mapping[str, Any]) -> Table:
    """Loss of each expert on each cluster; the last columns average inside and outside of its own."""
    experts = figures["experts"]
    table = Table(box=box.SIMPLE_HEAD, title="held-out loss by cluster", title_justify="left")
    for heading in ("", *map(str, range(len(experts["loss"]))), "own", "others"):
        table.add_column(heading, justify="right" if heading else "left")
    for k, row in enumerate(experts["loss"]):
        values = [f"{value:.4f}" for value in (*row, experts["in_cluster"][k], experts["out_of_cluster"][k])]
        table.add_row(f"expert-{k}", *(values if len(row) > 1 else [*values[:-1], "–"]))
    return table


def diagnosis_lines(figures: Mapping[str, Any]) -> list[str]:
    """One line for each branch of the router and for each strategy."""
    lines = []
    for branch, scores in figures["router"].items():
        accuracy, nll = (float(np.mean(scores[name])) for name in ("accuracy", "nll_calibrated"))
        before, after = (max(scores[f"calibration_error{suffix}"]) for suffix in ("", "_calibrated"))
        chance = max(scores["calibration_error_by_chance"])
        lines.append(
            f"router, {branch}: accuracy {accuracy:.3f}, NLL {nll:.3f}, largest ECE {before:.3f}, "
            f"calibrated {after:.3f}, by chance {chance:.3f}"
        )
    shares = figures["shares"]
    expected = ", ".join(f"{share:.3f}" for share in shares["expected"])
    lines.append(f"shares by a classifier of accuracy {shares['classifier_accuracy']:.3f}; expected {expected}:")
    for name, found in shares["strategies"].items():
        own = ", ".join(f"{share:.3f}" for share in found["shares"])
        lines.append(f"{name} ({found['solver']}): {own}; total variation {found['total_variation']:.3f}")
    return [*lines, f"total variation expected by chance alone: {shares['by_chance']:.3f}"]


def _experts(figures: Mapping[str, Any]) -> Figure:
    experts, times = figures["experts"], figures["times"]
    loss, by_time = np.array(experts["loss"]), np.array(experts["loss_by_time"])
    figure = Figure(figsize=(13, 4), layout="constrained")
    matrix, by_cluster, disagreement = figure.subplots(1, 3)
    excess = loss / loss.min(0) - 1  # over the best expert of the cluster
    heat_map(matrix, excess, loss, ".3f", cmap="Blues", vmin=0)
    matrix.set(title="held-out loss (darker is worse)", xlabel="cluster", ylabel="expert")
    own = np.eye(len(loss), dtype=bool)
    curves = {"own cluster": by_time[:, own].mean(1)}
    if len(loss) > 1:
        curves["other clusters"] = by_time[:, ~own].mean(1)
    _curves(by_cluster, "held-out loss by time", times, curves)
    curves = {"variance / mean²": experts["disagreement"]} if experts["disagreement"] else {}
    _curves(disagreement, "disagreement of routed experts", times, curves)
    return figure


def _router(figures: Mapping[str, Any]) -> Figure:
    times = figures["times"]
    charts: dict[str, dict[str, Any]] = {
        "held-out accuracy": {"largest cluster": [max(figures["priors"])] * len(times)}
    }
    for branch, scores in figures["router"].items():
        charts["held-out accuracy"][branch] = scores["accuracy"]
        for title, name in (("held-out NLL (nats)", "nll"), ("calibration error (ECE)", "calibration_error")):
            charts.setdefault(title, {})[branch] = scores[name]
            charts[title][f"{branch}, calibrated"] = scores[f"{name}_calibrated"]
        charts["calibration error (ECE)"][f"{branch}, by chance"] = scores["calibration_error_by_chance"]
    figure = Figure(figsize=(4 * len(charts), 5), layout="constrained")
    for axis, (title, curves) in zip(figure.subplots(1, len(charts)), charts.items(), strict=True):
        _curves(axis, title, times, curves)
    return figure


def _curves(axis: Axes, title: str, times: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    for label, values in curves.items():
        axis.plot(times, values, "o-", label=label)
    axis.set(title=title, xlabel="t (1 is noise)")
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)
    if curves:
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _shares(figures: Mapping[str, Any]) -> Figure:
    shares = figures["shares"]
    rows = {"expected": shares["expected"]}
    for name, found in shares["strategies"].items():
        rows[f"{name} (TV {found['total_variation']:.3f})"] = found["shares"]
    values = np.array(list(rows.values()))
    figure = Figure(figsize=(4 + len(values[0]), 1 + len(rows) / 2), layout="constrained")
    axis = figure.subplots()
    heat_map(axis, values, values, ".3f", cmap="viridis", vmin=0, aspect="auto")
    axis.set(title="clusters' shares among samples", xlabel="cluster")
    axis.set_yticks(range(len(rows)), list(rows))
    return figure
