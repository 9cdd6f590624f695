"""Write the tables of README.md and docs/ anew from the committed results.

A table stands between ``<!-- table NAME FILE -->`` and ``<!-- end of table -->``; FILE is below ``benchmarks/results``.

    make report
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from common import REPOSITORY, Report
from flop_report import Results, curves_figure, write_figures

from ddm_lightning.core.files import atomic_write_text

_TABLE = re.compile(r"(<!-- table (\S+) (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
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
        error, gflop = (mean(row[key] for row in rows) for key in ("shares_tv", "gflop_per_image"))
        table.row(label, f"{mean(results.kid(method)):.3f}", results.ratio(method), f"{error:.3f}", f"{gflop:.2f}")
    return table


TABLES: Mapping[str, Callable[[Mapping[str, Any]], Report]] = {"mix": _mix}


def rendered(text: str, results: Path) -> str:
    """``text`` with all its tables made anew."""

    def table(found: re.Match[str]) -> str:
        start, name, file, end = found.groups()
        document = json.loads((results / file).read_text())
        return start + "\n".join(TABLES[name](document).table_lines()) + "\n" + end

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
    write_figures(REPOSITORY / "docs" / "images", {"equal_flops": curves_figure(Results(mix))})


if __name__ == "__main__":
    main()
