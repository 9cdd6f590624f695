"""Charts of a diagnosis, as PNG files and in TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from ddm_lightning.core.files import atomic_write


def write_figures(folder: Path, figures: Mapping[str, Any]) -> None:
    """Draw ``experts.png``, ``router.png`` (with a router) and ``shares.png``; log the same to TensorBoard."""
    from torch.utils.tensorboard.writer import SummaryWriter

    charts = {"experts": _experts(figures), "shares": _shares(figures)}
    if figures["router"]:
        charts["router"] = _router(figures)
    with SummaryWriter(str(folder / "tensorboard")) as writer:
        for name, figure in charts.items():
            atomic_write(folder / f"{name}.png", partial(figure.savefig, format="png", dpi=120))
            writer.add_figure(f"diagnosis/{name}", figure)


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
        ece = f"largest ECE {before:.3f}, calibrated {after:.3f}, by chance {chance:.3f}"
        lines.append(f"router, {branch}: accuracy {accuracy:.3f}, NLL {nll:.3f}, {ece}")
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
    matrix, own, disagreement = figure.subplots(1, 3)
    excess = loss / loss.min(0) - 1  # over the best expert of the cluster
    matrix.imshow(excess, cmap="Blues", vmin=0)
    for (k, cluster), value in np.ndenumerate(loss):
        colour = "w" if excess[k, cluster] > 0.5 * excess.max() else "k"
        matrix.text(cluster, k, f"{value:.3f}", ha="center", va="center", color=colour, fontsize=8)
    matrix.set(title="held-out loss (darker is worse)", xlabel="cluster", ylabel="expert")
    matrix.set(xticks=range(len(loss)), yticks=range(len(loss)))
    inside = np.eye(len(loss), dtype=bool)
    own.plot(times, by_time[:, inside].mean(1), "o-", label="own cluster")
    if len(loss) > 1:
        own.plot(times, by_time[:, ~inside].mean(1), "o-", label="other clusters")
    own.set(title="held-out loss by time", xlabel="t (1 is noise)")
    own.legend(fontsize=8)
    if experts["disagreement"]:
        disagreement.plot(times, experts["disagreement"], "o-")
    disagreement.set(title="disagreement of routed experts", xlabel="t (1 is noise)", ylabel="variance / mean²")
    for axis in (own, disagreement):
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    return figure


def _router(figures: Mapping[str, Any]) -> Figure:
    times, exact = figures["times"], figures.get("exact")
    figure = Figure(figsize=(16 if exact else 12, 5), layout="constrained")
    axes = figure.subplots(1, 4 if exact else 3)
    for colour, (branch, scores) in enumerate(figures["router"].items()):
        axes[0].plot(times, scores["accuracy"], "o-", label=branch)
        for axis, name in ((axes[1], "nll"), (axes[2], "calibration_error")):
            axis.plot(times, scores[name], "o--", color=f"C{colour}", alpha=0.4, label=branch)
            axis.plot(times, scores[f"{name}_calibrated"], "o-", color=f"C{colour}", label=f"{branch}, calibrated")
        axes[2].plot(
            times, scores["calibration_error_by_chance"], ":", color=f"C{colour}", label=f"{branch}, by chance"
        )
    axes[0].axhline(max(figures["priors"]), color="0.6", linestyle=":", label="largest cluster")
    titles = ["held-out accuracy", "held-out NLL (nats)", "calibration error (ECE)"]
    if exact:
        axes[3].plot(times, exact["total_variation"], "o-", label="router: total variation")
        axes[3].plot(times, exact["velocity_error"], "o-", label="velocity: relative L2 error")
        titles.append("distance to the exact answer")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="t (1 is noise)")
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))
        axis.grid(alpha=0.3)
    return figure


def _shares(figures: Mapping[str, Any]) -> Figure:
    shares = figures["shares"]
    rows = {"expected": {"shares": shares["expected"]}, **shares["strategies"]}
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    width = 0.8 / len(rows)
    for index, (name, row) in enumerate(rows.items()):
        note = f" (TV {row['total_variation']:.3f})" if "total_variation" in row else ""
        places = np.arange(len(row["shares"])) + (index - (len(rows) - 1) / 2) * width
        colour = "0.6" if index == 0 else f"C{index - 1}"
        axis.bar(places, row["shares"], width * 0.95, label=f"{name}{note}", color=colour)
    axis.set(title="clusters' shares among samples", xlabel="cluster", xticks=range(len(shares["expected"])))
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axis.grid(alpha=0.3, axis="y")
    return figure
