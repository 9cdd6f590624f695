"""Errors of a trained ensemble against the closed-form velocity of its training digits, by time.

Trains two unconditional experts and a router on scikit-learn's 8×8 digits (about a minute). Then compares the full
ensemble with the exact velocity of its training set, each expert with the exact velocity of its cluster, and the router
with the exact cluster posterior.

    python benchmarks/oracle_digits.py --json benchmarks/results/oracle_digits.json
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from common import REPOSITORY, Report, load, parse, parser, run
from finite_set import FiniteSetOracle
from split import Split, noised, read_split, trained
from torch import Tensor
from torch.nn import functional as F

from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.shards.manifest import TRAIN

TIMES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
BAR, BAR_FROM = 0.2, 0.75
NUM_DRAWS = 2
# Replaces the experiment's steps, in a separate run folder.
QUICK_STEPS = 250


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", config=str(REPOSITORY / "experiments" / "digits_2x.yaml"))
    options = parse(cli, arguments)
    ours: list[str] = []
    if options.quick:
        ours = [f"run_dir={load(options).run_dir}-quick"]
        ours += [f"{role}.train.max_steps={QUICK_STEPS}" for role in ("expert", "router")]
    trained_run, ensemble = trained(options, *ours)
    report = measure(ensemble, read_split(trained_run, TRAIN), trained_run.experiment.seed)
    report.finish(options.json)


def measure(ensemble: Ensemble, split: Split, seed: int, times: Sequence[float] = TIMES) -> Report:
    """Measure relative errors against the oracle on noisy versions of all training points, by time."""
    num_clusters = ensemble.num_clusters
    oracle = FiniteSetOracle(split.x_0, split.clusters, num_clusters)
    report = Report(
        f"Relative L2 error against the exact velocity of {len(split)} training points",
        ["t", "ensemble", *(f"expert-{k}" for k in range(num_clusters)), "router's total variation"],
    )
    worst = 0.0
    for t in times:
        x_t = torch.cat([noised(split.x_0, t, draw, seed, purpose="oracle") for draw in range(NUM_DRAWS)])
        clusters = split.clusters.repeat(NUM_DRAWS)
        errors = {
            "ensemble": relative_error(ensemble.velocity(x_t, _rows(t, x_t)), oracle.velocity(x_t, _rows(t, x_t)))
        }
        own = F.one_hot(clusters, num_clusters).bool()
        found = ensemble.expert_velocities(x_t, _rows(t, x_t), None, own)
        for k in range(num_clusters):
            x_k = x_t[own[:, k]]
            errors[f"expert-{k}"] = relative_error(found[own[:, k], k], oracle.velocity(x_k, _rows(t, x_k), k))
        posterior = oracle.cluster_posterior(x_t, _rows(t, x_t))
        variation = float((ensemble.probabilities(x_t, _rows(t, x_t)) - posterior).abs().sum(1).mean() / 2)
        report.row(f"{t:.2f}", *(f"{error:.1%}" for error in errors.values()), f"{variation:.3f}")
        for name, error in errors.items():
            report.figures[f"{name.replace('-', '_')}_error_t{t:.2f}"] = error
        report.figures[f"router_total_variation_t{t:.2f}"] = variation
        worst = max(worst, errors["ensemble"]) if t >= BAR_FROM else worst
    report.figures[f"worst_ensemble_error_from_t{BAR_FROM:.2f}"] = worst
    report.note(
        f"Largest error of the ensemble at t >= {BAR_FROM}: {worst:.1%}; the bar is {BAR:.0%}. Near t = 0 the exact "
        "velocity of a finite set leads to a single training point, which a network that generalises does not memorise."
    )
    return report


def relative_error(found: Tensor, exact: Tensor) -> float:
    """``|found - exact| / |exact|`` over all samples together."""
    return float((found - exact).norm() / exact.norm())


def _rows(t: float, x: Tensor) -> Tensor:
    return torch.full((len(x),), t)


if __name__ == "__main__":
    run(main)
