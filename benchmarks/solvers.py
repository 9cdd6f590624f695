"""Sample an ensemble from the same noise by two solvers of one evaluation per step: KID and shares of the clusters.

python benchmarks/solvers.py sample.num_steps=50 --json benchmarks/results/solvers.json
"""

from __future__ import annotations

from collections.abc import Sequence

from common import REPOSITORY, Report, call, load, parse, parser, run, use_all_threads
from flop_sampling import Method, Settings, Task, sample_all
from flop_scores import OTHER, PLAIN, Judge, ratio

from ddm_lightning.members.run import Run

SOLVERS = ("euler", "dpm++2m")
"""The first one is compared with."""
STRATEGIES = ("full", "top-1", "sample-1")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", config=str(REPOSITORY / "experiments" / "mix_4x.yaml"))
    cli.add_argument("--num", type=int, default=1000, help="images of each way (1000)")
    options = parse(cli, arguments)
    call("fit", options)
    use_all_threads()
    trained = Run(load(options))
    experiment = trained.experiment
    folder = trained.folder.root / "benchmarks"
    names = [experiment.prepare.features.name, OTHER.name]
    judge = Judge(trained, [experiment.prepare.features, OTHER, PLAIN], folder / "features")
    num = 100 if options.quick else options.num
    settings = Settings(num, experiment.sample.num_steps, 1.0, experiment.seed)
    headings = ["strategy, solver", *(f"KID, {name}" for name in names), "error of shares"]
    report = Report(f"Solvers, {settings.num_steps} steps", headings)
    for strategy in STRATEGIES:
        methods = [Method(solver, strategy, solver) for solver in SOLVERS]
        tasks = [Task(method, trained.folder.root, trained, settings, folder / "solvers") for method in methods]
        features = [judge.features(found.images) for found in sample_all(tasks, 2)]
        distances = [judge.distances(found) for found in features]
        for solver, found, kids in zip(SOLVERS, features, distances, strict=True):
            key = f"{strategy}_{solver}"
            cells = []
            for name in names:
                over = ratio([kids[name]], [distances[0][name]])
                report.figures[f"kid_{key}_{name}"] = kids[name].value
                report.figures |= over.figures(f"kid_over_euler_{key}_{name}")
                cells.append(f"{kids[name].value:.3f}: {over}")

            error = judge.variation(found[PLAIN.name])
            report.figures[f"shares_tv_{key}"] = error
            report.row(f"{strategy}, {solver}", *cells, f"{error:.3f}")

    report.note("KID to held-out images, and its ratio to that of `euler` with a 95 % interval over images alone.")
    report.finish(options.json)


if __name__ == "__main__":
    run(main)
