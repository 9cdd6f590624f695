r"""Compare methods, each at the guidance that suits it best, from results of ``flop_matched.py --guidance``.

A method's scale for one training seed is that of the lowest mean KID over the other seeds, so no network is scored at a
scale that it chose. The held-out images are the same for all seeds.

    python benchmarks/flop_guidance.py benchmarks/results/flop_matched_mixt_4x.json \
        benchmarks/results/flop_matched_mixt_4x_guidance_{1.5,2,3}.json \
        --json benchmarks/results/flop_guidance_mixt_4x.json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from common import Report, run
from flop_report import label_of
from flop_scores import Interval, Point, baseline_of, of_method, over

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
    networks: list[str] = []
    for path in options.results:
        document = read_json(path, "results of flop_matched.py", "give a file that its --json wrote")
        if not {"settings", "features", "points"} <= document.keys():
            raise UserError(f"{path}: holds no results of flop_matched.py; give a file that its --json wrote")
        scale, networks = document["figures"]["guidance_scale"], document["features"]
        if scale in points:
            raise UserError(f"{path}: guidance {scale:g} is in an earlier file, too; give one file for each scale")
        points[scale] = [Point.from_dict(one) for one in document["points"]]
    report = compare(dict(sorted(points.items())), *networks)
    report.finish(options.json)


def compare(points: Mapping[float, Sequence[Point]], network: str, other: str) -> Report:
    """Tabulate methods at the largest budget by guidance, and tuned.

    Args:
        points: by guidance scale.
        network: the feature network by which scales are chosen.
        other: another, which shows whether the choice suits it, too.

    Raises:
        UserError: the monolith has fewer than two seeds at all scales.
    """
    compared = [point for scored in points.values() for point in scored if point.variant == "main"]
    largest = max(point.share for point in compared)
    methods = dict.fromkeys((p.variant, p.method) for scored in points.values() for p in scored if p.share == largest)
    tables = {}
    for variant, method in methods:
        rows = {scale: of_method(scored, method, largest, variant) for scale, scored in points.items()}
        seeds = set.intersection(*({point.seed for point in row} for row in rows.values()))
        if len(seeds) > 1:
            tables[variant, method] = {s: [one for one in row if one.seed in seeds] for s, row in rows.items()}
    solvers = {
        variant: {name: tables[variant, name] for name in MONOLITHS}
        for variant in dict.fromkeys(variant for variant, _ in tables)
        if all((variant, name) in tables for name in MONOLITHS)
    }
    if "main" not in solvers:
        raise UserError("the monolith needs two seeds at each guidance scale, so that one can choose for the other")
    better = {variant: tuned([*own.values()], network) for variant, own in solvers.items()}
    columns = ["tuned", "scales", "over monolith", "over the better monolith", f"over the better ({other})"]
    report = Report(
        f"KID ({network}) by guidance scale, and tuned", ["method", *(f"{scale:g}" for scale in points), *columns]
    )
    for (variant, method), rows in tables.items():
        best, suffix = tuned([rows], network), "" if variant == "main" else f", {variant.replace('_', ' ')}"
        of = variant if variant in solvers else "main"
        scales = " ".join(f"{scale:g}" for point in best for scale, row in rows.items() if point in row)
        ratios: dict[str, Interval | None] = {}
        if method not in MONOLITHS:
            ratios = {
                "over_monolith": over(best, tuned([solvers[of][baseline_of(method)]], network), network),
                "over_better_monolith": over(best, better[of], network),
                "other_features_over_better_monolith": over(best, better[of], other),
            }
        shown = [f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]" for found in ratios.values() if found]
        values = [f"{mean_kid(row, network):.3f}" for row in (*rows.values(), best)]
        report.row(label_of(method) + suffix, *values, scales, *shown, *[""] * (3 - len(shown)))
        report.figures[f"kid_{variant}_{method}"] = mean_kid(best, network)
        for name, found in ratios.items():
            report.figures |= found.figures(f"{variant}_{method}_{name}") if found else {}
    report.figures["kid_better_monolith"] = mean_kid(better["main"], network)
    report.note(
        "Tuned: each seed at the scale with the lowest mean KID over the other seeds. Over monolith: its tuned KID "
        "under the same kind of solver; over the better: under the solver, too, that the other seeds choose, "
        f"{mean_kid(better['main'], network):.3f} in the main comparison. A variant with a monolith of its own is "
        "compared with that one. Brackets hold 95 % bootstrap intervals over seeds and images; they do not include the "
        "choice of the scale."
    )
    return report


def mean_kid(row: Sequence[Point], network: str) -> float:
    """Mean KID over seeds."""
    return mean(point.kid[network].value for point in row)


def tuned(candidates: Sequence[Rows], network: str) -> list[Point]:
    """For each seed, its point under the method and scale that have the lowest mean KID over the other seeds.

    Args:
        candidates: methods to choose from, with the same seeds.
        network: of the KID.
    """
    rows = [row for method in candidates for row in method.values()]

    def by_others(index: int) -> Sequence[Point]:
        return min(rows, key=lambda row: mean_kid([*row[:index], *row[index + 1 :]], network))

    return [by_others(index)[index] for index in range(len(rows[0]))]


if __name__ == "__main__":
    run(main)
