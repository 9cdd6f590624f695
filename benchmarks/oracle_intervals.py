"""Errors against the closed-form velocity, by t: experts by cluster, and by cluster and noise level, at equal FLOPs.

Trains `digits_2x` (two clusters, an expert each) and `digits_2x2` (two clusters, two intervals of t each) with the same
router, seed by seed, and compares both with the exact velocity of the training digits.

    python benchmarks/oracle_intervals.py --json benchmarks/results/oracle_intervals.json
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from common import REPOSITORY, Report, parse, parser, run
from matplotlib.figure import Figure
from oracle_digits import QUICK_STEPS, measure
from split import read_split, trained

from ddm_lightning.members.cost import MemberCost
from ddm_lightning.shards.manifest import TRAIN

TIMES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.61, 0.62, 0.63, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99)
NAMES = ("digits_2x", "digits_2x2")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", config="")
    cli.add_argument("--seeds", type=int, default=1, help="trainings of each (1)")
    options = parse(cli, arguments)
    errors: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    flops, edge = dict.fromkeys(NAMES, 0.0), 0.0
    for seed, name in ((seed, name) for seed in range(options.seeds) for name in NAMES):
        options.config = REPOSITORY / "experiments" / f"{name}.yaml"
        ours = [f"run_dir=runs/{name}-seed-{seed}{'-quick' * options.quick}", f"seed={seed}"]
        ours += [f"{role}.train.max_steps={QUICK_STEPS}" for role in ("expert", "router") if options.quick]
        trained_run, ensemble = trained(options, *ours)
        figures = measure(ensemble, read_split(trained_run, TRAIN), 0, TIMES).figures
        errors[name].append([figures[f"ensemble_error_t{t:.2f}"] for t in TIMES])
        members = [trained_run.member(member) for member in trained_run.names]
        flops[name] = sum(MemberCost(one).flops() * one.batch_size * one.train.max_steps for one in members)
        edge = max(one.interval[0] for one in members)
    report = Report("Relative L2 error against the exact velocity, mean of the seeds", ["t", *NAMES, "ratio"])
    means = {name: np.mean(rows, axis=0) for name, rows in errors.items()}
    for t, one, other in zip(TIMES, *means.values(), strict=True):
        report.row(f"{t:.2f}", f"{one:.1%}", f"{other:.1%}", f"{other / one:.3f}")
        report.figures |= {f"error_digits_2x_t{t:.2f}": one, f"error_digits_2x2_t{t:.2f}": other}
    report.details = {"times": TIMES, "errors": errors}
    ratio = means["digits_2x2"] / means["digits_2x"]
    cost = flops["digits_2x2"] / flops["digits_2x"]
    report.figures |= {"worst_ratio": ratio.max(), "mean_ratio": ratio.mean(), "flops_ratio": cost}
    report.note(f"Seeds: {options.seeds}. Training FLOPs, router included: {cost:.3f} of those of digits_2x.")
    report.finish(options.json, curves(means, edge))


def curves(errors: dict[str, np.ndarray], edge: float) -> Figure:
    """Draw the errors by t, with the boundary between experts."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for name, values in errors.items():
        axis.plot(TIMES, values, "o-", markersize=3, label=name)
    axis.axvline(edge, color="grey", linestyle="--", label=f"boundary, t = {edge:g}")
    axis.set(xlabel="t (1 is noise)", ylabel="relative L2 error of the velocity", ylim=(0, None))
    axis.legend()
    return figure


if __name__ == "__main__":
    run(main)
