"""Report the figures of a diagnosis: a table, lines and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from ddm_lightning.core.files import atomic_write
from ddm_lightning.core.formatting import table
from ddm_lightning.core.grids import heat_map

# A router whose NLL is above this share of the priors' NLL tells no more than the priors.
MOST_UNTOLD = 0.98
# Above this t, it need not.
HIGHEST_BLIND = 0.85


def diagnosis_table(figures: Mapping[str, Any]) -> Table:
    """Loss of each expert on each cluster; the last columns average inside and outside of its own.

    With buckets, also the loss of each cluster's own expert on the images of each bucket.
    """
    experts = figures["experts"]
    num = len(experts["loss"])
    rows = []
    for k, losses in enumerate(experts["loss"]):
        row = [f"{loss:.4f}" for loss in losses]
        others = f"{experts['out_of_cluster'][k]:.4f}" if num > 1 else "–"
        rows.append([experts["names"][k], *row, f"{experts['in_cluster'][k]:.4f}", others])

    for (bucket, counts), losses in zip(
        figures.get("buckets", {}).items(), experts.get("in_cluster_by_bucket", []), strict=False
    ):
        row = []
        for loss, count in zip(losses, counts, strict=True):
            row.append(f"{loss:.4f}" if count else "–")

        rows.append([f"{bucket}, own experts", *row, f"{np.average(losses, weights=counts):.4f}", ""])

    return table(["", *map(str, range(num)), "own", "others"], rows, "held-out loss by cluster")


def diagnosis_lines(figures: Mapping[str, Any]) -> list[str]:
    """One line for each branch of the router and for each strategy, and a warning for what they lack."""
    lines = []
    for branch, scores in figures["router"].items():
        lines.append(
            f"router, {branch}, {figures['num_judged']:,} images: accuracy {np.mean(scores['accuracy']):.3f}, "
            f"NLL {np.mean(scores['nll_calibrated']):.3f}, largest ECE {max(scores['calibration_error']):.3f}, "
            f"calibrated {max(scores['calibration_error_calibrated']):.3f}, "
            f"by chance {max(scores['calibration_error_by_chance']):.3f}"
        )
        if "accuracy_by_bucket" in scores:
            means = np.mean(scores["accuracy_by_bucket"], 0)
            each = []
            for bucket, mean in zip(figures["buckets"], means, strict=True):
                each.append(f"{bucket} {mean:.3f}")

            lines.append(f"router, {branch}, accuracy by bucket: {', '.join(each)}")

        blind = []
        for t, nll, nll_of_priors in zip(
            figures["times"], scores["nll_calibrated"], scores["nll_of_priors"], strict=True
        ):
            if nll > MOST_UNTOLD * nll_of_priors:
                blind.append(t)

        if blind and blind[0] < HIGHEST_BLIND:
            times = ", ".join(f"{t:.2f}" for t in blind)
            lines.append(
                f"warning: at t = {times} this router tells no more than the priors. If clusters differ there, rare "
                "ones lose images under every strategy that asks it there; train it longer, or at more noise "
                "(router.timesteps)"
            )

    shares = figures["shares"]
    limit = shares["by_chance_95"]
    accuracy = shares["classifier_accuracy"]
    lines.append(f"shares by a classifier of accuracy {accuracy:.3f}; expected {_shares_text(shares['expected'])}:")
    for name, found in shares["strategies"].items():
        distance = found["total_variation"]
        verdict = "within chance" if distance <= limit else "more than chance"
        own = _shares_text(found["shares"])
        lines.append(f"{name} ({found['solver']}): {own}; total variation {distance:.3f}, {verdict}")

    lines.append(
        f"{figures['num_images']:,} real images have a total variation of {shares['by_chance']:.3f} by chance, below "
        f"{limit:.3f} in 19 of 20 cases; --num takes more"
    )
    return lines


def _shares_text(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in shares)


def draw_charts(folder: Path, figures: Mapping[str, Any]) -> None:
    """Draw ``experts.png``, ``router.png`` (with a router) and ``shares.png``."""
    charts = {"experts": _experts(figures), "shares": _shares(figures)}
    if figures["router"]:
        charts["router"] = _router(figures)

    for name, figure in charts.items():
        atomic_write(folder / f"{name}.png", partial(figure.savefig, format="png", dpi=120))


def _experts(figures: Mapping[str, Any]) -> Figure:
    experts = figures["experts"]
    times = figures["times"]
    loss = np.array(experts["loss"])
    by_time = np.array(experts["loss_by_time"])
    figure = Figure(figsize=(13, 4), layout="constrained")
    matrix, by_cluster, disagreement = figure.subplots(1, 3)
    # Colours show the excess over the best expert of the cluster.
    heat_map(matrix, loss / loss.min(0) - 1, loss, ".3f", cmap="Blues", vmin=0)
    matrix.set(title="held-out loss (darker is worse)", xlabel="cluster", ylabel="expert")
    own = np.eye(len(loss), dtype=bool)
    curves = {"own cluster": by_time[:, own].mean(1)}
    if len(loss) > 1:
        curves["other clusters"] = by_time[:, ~own].mean(1)

    _curves(by_cluster, "held-out loss by time", times, curves)
    curves = {}
    if experts["disagreement"]:
        curves["variance / mean²"] = experts["disagreement"]

    _curves(disagreement, "disagreement of routed experts", times, curves)
    return figure


def _router(figures: Mapping[str, Any]) -> Figure:
    times = figures["times"]
    accuracy = {"largest cluster": [max(figures["priors"])] * len(times)}
    nll = {}
    error = {}
    for branch, scores in figures["router"].items():
        accuracy[branch] = scores["accuracy"]
        nll[branch] = scores["nll"]
        nll[f"{branch}, calibrated"] = scores["nll_calibrated"]
        error[branch] = scores["calibration_error"]
        error[f"{branch}, calibrated"] = scores["calibration_error_calibrated"]
        error[f"{branch}, by chance"] = scores["calibration_error_by_chance"]

    figure = Figure(figsize=(12, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _curves(left, "held-out accuracy", times, accuracy)
    _curves(middle, "held-out NLL (nats)", times, nll)
    _curves(right, "calibration error (ECE)", times, error)
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
