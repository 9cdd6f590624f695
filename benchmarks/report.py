"""Write the tables of README.md and docs/ anew from the committed results.

A table stands between ``<!-- table mix FILE -->`` or ``<!-- table gains -->`` and ``<!-- end of table -->``; FILE is
below ``benchmarks/results``.

    make report
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import REPOSITORY, Report, save_figure
from flop_report import Results, curves_figure
from flop_scores import OTHER, mean_kid, mean_score

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
    ("captions", "x_0", 4, 32, "mixt_4x", "main"),
)
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


def _gains(results: Path) -> Report:
    """What experts gain over a monolith, by condition, prediction, clusters, width and budget."""
    methods = ("top1", "sample1", "bayes")
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
    for *setting, file, variant in _GAINS:
        found = Results(json.loads((results / f"flop_matched_{file}.json").read_text()))
        has_other = found.other == OTHER.name
        for share in [share for name, share in found.compared if name == variant]:
            rows = found.rows("bayes", share, variant)
            cells = [f"{share:g}", str(len(rows)), found.loss_ratio(share, variant)]
            cells += [found.gain(method, share, variant) for method in methods]
            for method in methods:
                cells.append(found.gain(method, share, variant, "other_features_") if has_other else "–")

            table.row(*map(str, setting), *cells)

    return table


def rendered(text: str, results: Path) -> str:
    """``text`` with all its tables made anew."""

    def table(found: re.Match[str]) -> str:
        start, file, end = found.groups()
        made = _mix(json.loads((results / file).read_text())) if file else _gains(results)
        return "\n".join([start, *made.table_lines(), end])

    return _TABLE.sub(table, text)


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
    save_figure(REPOSITORY / "docs" / "images" / "equal_flops.png", curves_figure(Results(mix)))


if __name__ == "__main__":
    main()
