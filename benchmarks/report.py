"""Write the tables of README.md and docs/ anew from the committed results.

A table stands between ``<!-- table mix FILE -->`` or ``<!-- table gains -->`` and ``<!-- end of table -->``; FILE is
below ``benchmarks/results``.

    make report
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import REPOSITORY, Report, save_figure
from flop_report import Results, curves_figure, label_of, powers_of_two
from flop_scores import OTHER, mean_kid, mean_score
from matplotlib.figure import Figure

from ddm_lightning.core.files import atomic_write_text

_TABLE = re.compile(r"(<!-- table (?:mix (\S+)|gains) -->)\n.*?(<!-- end of table -->)", re.DOTALL)
_GAINS = (
    # condition, prediction, clusters, width, results, variant
    ("none", "x_0", 2, 32, "mix_4x_variants", "clusters_2"),
    ("none", "x_0", 4, 32, "mix_4x", "main"),
    ("none", "x_0", 8, 32, "mix_8x", "main"),
    ("none", "velocity", 2, 32, "mix_4x_velocity_variants", "clusters_2"),
    ("none", "velocity", 4, 32, "mix_4x_velocity_variants", "main"),
    ("none", "velocity", 4, 32, "mix_4x_velocity", "main"),
    ("classes", "x_0", 4, 32, "mixt_4x", "class_condition"),
    ("classes", "velocity", 4, 32, "mixt_4x_velocity", "main"),
    ("captions", "x_0", 4, 32, "mixt_4x", "main"),
)
_PANELS = {
    "none": ("bayes", "no condition,"),
    "classes": ("top1", "classes,"),
    "captions": ("top1", "captions,"),
}
"""By condition, what one would sample by, and the title."""
_MIX = {
    "monolith, ODE": "monolith",
    "monolith, ancestral": "monolith_ancestral",
    "`bayes`, ancestral": "bayes",
    "`sample-1`, ODE": "sample1",
    "`top-1`, ODE": "top1",
}


def _mix(document: Mapping[str, Any]) -> Report:
    """Equal training FLOPs on the mixture: the methods that matter, in short."""
    results = Results(document)
    table = Report("", ["", "KID", "over monolith", "error of shares", "GFLOP per image"])
    for label, method in _MIX.items():
        rows = results.rows(method)
        kid = f"{mean_kid(rows, results.network):.3f}"
        error = f"{mean_score(rows, 'shares_tv'):.3f}"
        gflop = f"{mean_score(rows, 'gflop_per_image'):.2f}"
        table.row(label, kid, results.ratio(method), error, gflop)

    return table


def _gain_results(results: Path) -> Iterator[tuple[tuple[Any, ...], Results, str, list[float]]]:
    """Setting, results, variant and budgets of each entry of the table of gains."""
    for *setting, file, variant in _GAINS:
        found = Results(json.loads((results / f"flop_matched_{file}.json").read_text()))
        yield tuple(setting), found, variant, [share for name, share in found.compared if name == variant]


def _gains(results: Path) -> Report:
    """What experts gain over a monolith, by condition, prediction, clusters, width and budget."""
    methods = [(method, prefix) for prefix in ("", "other_features_") for method in ("top1", "sample1", "bayes")]
    headings = ["condition", "prediction", "K", "width", "budget", "seeds", "held-out loss"]
    headings += [
        "`top-1`",
        "`sample-1`",
        "`bayes`",
        "`top-1`, SqueezeNet",
        "`sample-1`, SqueezeNet",
        "`bayes`, SqueezeNet",
    ]
    table = Report("", headings)
    for setting, found, variant, shares in _gain_results(results):
        for share in shares:
            rows = found.rows("bayes", share, variant)
            cells = [f"{share:g}", len(rows), found.loss_ratio(share, variant)]
            for method, prefix in methods:
                is_known = not prefix or found.other == OTHER.name
                cells.append((is_known and found.gain(method, share, variant, prefix)) or "–")

            table.row(*map(str, (*setting, *cells)))

    return table


def rendered(text: str, results: Path) -> str:
    """``text`` with all its tables made anew."""

    def table(found: re.Match[str]) -> str:
        start, file, end = found.groups()
        made = _mix(json.loads((results / file).read_text())) if file else _gains(results)
        return "\n".join([start, *made.table_lines(), end])

    return _TABLE.sub(table, text)


def gains_figure(results: Path) -> Figure:
    """Gains against the budget, a panel for each condition and a line for each setting."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = dict(zip(_PANELS, figure.subplots(1, len(_PANELS), sharex=True, sharey=True), strict=True))
    colors: dict[str, str] = {}
    for (condition, *network), found, variant, shares in _gain_results(results):
        method, title = _PANELS[condition]
        axes = panels[condition]
        axes.set(title=f"{title} {label_of(method)}", xscale="log", xlabel="share of 16,000 steps")
        axes.axhline(1, color="black", linewidth=1)
        gains = [gain for gain in (found.gain(method, share, variant) for share in shares) if gain]
        if len(gains) > 1:
            label = "{}, K = {}, width {}".format(*network)
            color = colors.setdefault(label, f"C{len(colors)}")
            values, lows, highs = np.transpose([(gain.value, gain.low, gain.high) for gain in gains])
            seeds = len(found.rows(method, shares[-1], variant))
            bars = (values - lows, highs - values)
            axes.errorbar(shares, values, bars, capsize=3, marker="o", color=color, label=f"{label}, seeds: {seeds}")

    for axes in panels.values():
        powers_of_two(axes.xaxis)
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8)

    panels["none"].set_ylabel("KID over the monolith's: below 1, experts pay")
    return figure


def main() -> None:
    """Rewrite the documents and their figures."""
    results = REPOSITORY / "benchmarks" / "results"
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = rendered(text, results)
        if new != text:
            atomic_write_text(path, new)
            print(f"rewritten: {path.relative_to(REPOSITORY)}")

    mix = json.loads((results / "flop_matched_mix_4x.json").read_text())
    images = REPOSITORY / "docs" / "images"
    save_figure(images / "equal_flops.png", curves_figure(Results(mix)))
    save_figure(images / "gains.png", gains_figure(results))


if __name__ == "__main__":
    main()
