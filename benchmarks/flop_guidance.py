r"""Compare methods, each at the guidance that suits it best, from results of ``flop_matched.py --guidance``.

A method's scale for one training seed is that of the lowest mean KID over the other seeds, so no network is scored at a
scale that it chose. The held-out images are the same for all seeds.

    python benchmarks/flop_guidance.py benchmarks/results/flop_matched_mixt_4x.json \
        benchmarks/results/flop_matched_mixt_4x_guidance_{1.5,2,3}.json \
        --json benchmarks/results/flop_guidance_mixt_4x.json
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from common import Report, run
from flop_report import label_of
from flop_scores import Point, baseline_of, grouped, mean_kid, over, shares_of

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import read_json

MONOLITHS = ("monolith", "monolith_ancestral")
Rows = Mapping[float, Sequence[Point]]
"""Points of one method by guidance scale, each in the order of the seeds."""


def main(arguments: Sequence[str] | None) -> None:
    """Run the comparison."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("results", nargs="+", type=Path, metavar="FILE", help="results, one for each guidance scale")
    cli.add_argument("--json", metavar="OUT", type=Path, help="write commit, device, command and figures here")
    options = cli.parse_args(arguments)
    points: dict[float, list[Point]] = {}
    for path in options.results:
        document = read_json(path, "results of flop_matched.py", "give a file that its --json wrote")
        scale = document["figures"]["guidance_scale"]
        if scale in points:
            raise UserError(f"{path}: guidance {scale:g} is in an earlier file, too; give one file for each scale")

        points[scale] = list(map(Point.from_dict, document["points"]))

    network, other = document["features"]  # type: ignore[possibly-undefined]  # of one file at least
    compare(dict(sorted(points.items())), network, other).finish(options.json)


def compare(points: Mapping[float, Sequence[Point]], network: str, other: str) -> Report:
    """Tabulate methods at the largest budget by guidance, and tuned.

    Args:
        points: by guidance scale.
        network: the feature network by which scales are chosen.
        other: another, which shows whether the choice suits it, too.

    Raises:
        UserError: the monolith has fewer than two seeds at all scales.
    """
    tables = comparable(points)
    monoliths: dict[str, list[Rows]] = {}
    for variant, method in tables:
        if method in MONOLITHS:
            monoliths.setdefault(variant, []).append(tables[variant, method])

    if "main" not in monoliths:
        raise UserError("the monolith needs two seeds at each guidance scale, so that one can choose for the other")

    scales = [f"{scale:g}" for scale in points]
    headings = ["method", *scales, "tuned", "scales", "over monolith", "over the better monolith"]
    report = Report(f"KID ({network}) by guidance scale, and tuned", [*headings, f"over the better ({other})"])
    for (variant, method), rows in tables.items():
        best = tuned([rows], network)
        kid = mean_kid(best.points, network)
        report.figures[f"kid_{variant}_{method}"] = kid
        ratios = []
        if method not in MONOLITHS:
            own = variant if variant in monoliths else "main"
            monolith = tuned([tables[own, baseline_of(method)]], network)
            better = tuned(monoliths[own], network)
            for name, other_side, features in (
                ("over_monolith", monolith, network),
                ("over_better_monolith", better, network),
                ("other_features_over_better_monolith", better, other),
            ):
                found = over(best.points, other_side.points, features)
                ratios.append(str(found or ""))
                if found is not None:
                    report.figures |= found.figures(f"{variant}_{method}_{name}")

        label = label_of(method)
        if variant != "main":
            label += f", {label_of(variant)}"

        kids = [f"{mean_kid(row, network):.3f}" for row in rows.values()]
        chosen = " ".join(map("{:g}".format, best.scales))
        ratios = ratios or [""] * 3
        report.row(label, *kids, f"{kid:.3f}", chosen, *ratios)

    better_kid = mean_kid(tuned(monoliths["main"], network).points, network)
    report.figures["kid_better_monolith"] = better_kid
    report.note(
        "Tuned: each seed at the scale with the lowest mean KID over the other seeds. Over monolith: its tuned KID "
        "under the same kind of solver; over the better: under the solver, too, that the other seeds choose, "
        f"{better_kid:.3f} in the main comparison. A variant with a monolith of its own is "
        "compared with that one. Brackets hold 95 % bootstrap intervals over seeds and images; they do not include the "
        "choice of the scale."
    )
    return report


def comparable(points: Mapping[float, Sequence[Point]]) -> dict[tuple[str, str], Rows]:
    """Points at the largest budget by variant and method, of the seeds that all scales have, if these are several."""
    groups = {scale: grouped(scored) for scale, scored in points.items()}
    first = next(iter(groups.values()))
    largest = shares_of(first)[-1]
    tables: dict[tuple[str, str], Rows] = {}
    for key in first:
        variant, share, method = key
        if share != largest:
            continue

        everywhere = Counter[int]()
        for group in groups.values():
            everywhere.update(point.seed for point in group.get(key, []))

        seeds = {seed for seed, num in everywhere.items() if num == len(groups)}
        rows = {}
        for scale, group in groups.items():
            rows[scale] = [point for point in group.get(key, []) if point.seed in seeds]

        if len(next(iter(rows.values()))) > 1:
            tables[variant, method] = rows

    return tables


class Tuned(NamedTuple):
    """The best point of each seed, and its scale."""

    points: list[Point]
    scales: list[float]


def tuned(candidates: Sequence[Rows], network: str) -> Tuned:
    """For each seed, its point under the method and scale that have the lowest mean KID over the other seeds.

    Args:
        candidates: methods to choose from, with the same seeds.
        network: of the KID.
    """
    rows: list[tuple[float, Sequence[Point]]] = []
    for method in candidates:
        rows += method.items()

    best = Tuned([], [])
    for index in range(len(rows[0][1])):
        kids = []
        for _, row in rows:
            others = [*row]
            del others[index]
            kids.append(mean_kid(others, network))

        scale, row = rows[kids.index(min(kids))]
        best.points.append(row[index])
        best.scales.append(scale)

    return best


if __name__ == "__main__":
    run(main)
