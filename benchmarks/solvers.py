"""Sample an ensemble from the same noise by two solvers of one evaluation per step: KID and shares of the clusters.

python benchmarks/solvers.py sample.num_steps=50 --json benchmarks/results/solvers.json
"""

from __future__ import annotations

from collections.abc import Sequence

from common import REPOSITORY, Report, parse, parser, run
from flop_sampling import Method, Settings, Task, sample_all
from flop_scores import OTHER, PLAIN, Judge, ratio
from split import trained

from ddm_lightning.evaluation.metrics.features import kernel_distance

SOLVERS = ("euler", "dpm++2m")
"""The first one is compared with."""
STRATEGIES = ("full", "top-1", "sample-1")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", config=str(REPOSITORY / "experiments" / "mix_4x.yaml"))
    cli.add_argument("--num", type=int, default=1000, help="images of each way (1000)")
    options = parse(cli, arguments)
    trained_run, _ = trained(options)
    experiment = trained_run.experiment
    folder = trained_run.folder.root / "benchmarks"
    networks = [experiment.prepare.features, OTHER]
    judge = Judge(trained_run, [*networks, PLAIN], folder / "features")
    settings = Settings(100 if options.quick else options.num, experiment.sample.num_steps, 1.0, experiment.seed)
    headings = ["strategy, solver", *(f"KID, {network.name}" for network in networks), "error of shares"]
    report = Report(f"Solvers, {settings.num_steps} steps", headings)
    for strategy in STRATEGIES:
        methods = [Method(solver, strategy, solver) for solver in SOLVERS]
        tasks = []
        for method in methods:
            tasks.append(Task(method, trained_run.folder.root, trained_run, settings, folder / "solvers"))

        scores = [judge.features(found.images) for found in sample_all(tasks, 2)]
        for solver, features in zip(SOLVERS, scores, strict=True):
            name = f"{strategy}_{solver}"
            cells = []
            for network in networks:
                kid, base = (
                    kernel_distance(one[network.name], judge.real[network.name]) for one in (features, scores[0])
                )
                over = ratio([kid], [base])
                report.figures[f"kid_{name}_{network.name}"] = kid.value
                report.figures |= over.figures(f"kid_over_euler_{name}_{network.name}")
                cells.append(f"{kid.value:.3f}: {over.value:.3f} [{over.low:.3f}, {over.high:.3f}]")

            report.figures[f"shares_tv_{name}"] = error = judge.variation(features[PLAIN.name])
            report.row(f"{strategy}, {solver}", *cells, f"{error:.3f}")

    report.note("KID to held-out images, and its ratio to that of `euler` with a 95 % interval over images alone.")
    report.finish(options.json)


if __name__ == "__main__":
    run(main)
