r"""Compare an ensemble with a monolith at equal training FLOPs, at several budgets and seeds.

Trains whatever is missing, samples from every method with the same noise, and scores the images against held-out ones.
An interrupted run continues where it stopped. ``--plan`` prints the cost and trains nothing.

    python benchmarks/flop_matched.py -c experiments/mix_4x.yaml --seeds 3 --budgets 0.125 0.25 0.5 1 \
        --num 1000 --json benchmarks/results/flop_matched_mix_4x.json

Points of other seeds, budgets and variants that OUT holds already stay in it. So a long comparison can be made, and its
results committed, in pieces: on another machine, ``--first-seed 1`` continues after the results of seed 0.

``--variants FILE NAME…`` adds controls and ablations: trainings under other settings, described in a YAML file such as
``benchmarks/variants_mix.yaml``. ``--quick`` trains each member for 20 steps in a folder of its own: it shows that
everything runs, and says nothing about quality.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from common import Report, load, origin_of_results, parse, parser, run, save_figure, write_results
from flop_report import Results, curves_figure, tables_of
from flop_sampling import METHODS, Settings, Task, sample_all
from flop_scores import HEADLINE, OTHER, PLAIN, Judge, Point, figures_of
from flop_training import TRAIN, Job, Study, Variant, variants_of

from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import read_json, sha256_json

QUICK_STEPS = 20
QUICK_NUM = 64
QUICK_SAMPLING_STEPS = 8
NAMES = [method.name for method in METHODS]
_SETTINGS = ("prepare", "condition", "expert", "router")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "")
    cli.add_argument("--seeds", type=int, default=1, help="trainings of every member, with seeds from --first-seed (1)")
    cli.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="the lowest seed (0)")
    cli.add_argument(
        "--budgets", type=float, nargs="+", default=[1.0], metavar="SHARE", help="shares of the experiment's steps (1)"
    )
    cli.add_argument("--num", type=int, default=2000, help=f"images per method (2000; {QUICK_NUM} with --quick)")
    cli.add_argument("--guidance", type=float, default=1.0, metavar="SCALE", help="classifier-free guidance (1: none)")
    cli.add_argument("--jobs", type=int, default=2, help="members trained, or methods sampled, at once (2)")
    cli.add_argument("--variants", nargs="+", default=[], metavar=("FILE", "NAME"), help="further trainings to compare")
    cli.add_argument(
        "--methods",
        nargs="+",
        default=NAMES,
        choices=NAMES,
        metavar="NAME",
        help=f"sample by these and {', '.join(HEADLINE)} only (all)",
    )
    cli.add_argument("--plan", action="store_true", help="print the trainings and their cost, and stop")
    options = parse(cli, arguments)
    if options.quick:
        options.num = min(options.num, QUICK_NUM)
        options.overrides = [*options.overrides, *_quick(options)]

    budgets = sorted(set(options.budgets))
    check_experiment(load(options), options.config)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    study = Study(options, [Variant("main", budgets=budgets, seeds=seeds), *variants_of(options.variants)])
    if options.plan:
        show_plan(study)
        return

    study.prepare()
    show_plan(study)
    described = itemgetter(*_SETTINGS)(asdict(study.experiment))
    settings = sha256_json([*described, study.experiment.sample.num_steps, options.num, options.guidance])
    before = earlier(options.json, settings)
    study.train(options.jobs)
    score(study, options, settings, before)


def _quick(options: Namespace) -> list[str]:
    """Settings of ``--quick``: few steps, in a folder of their own."""
    folder = Path(load(options).run_dir) / "quick"
    settings = [f"run_dir={folder}", f"sample.num_steps={QUICK_SAMPLING_STEPS}"]
    for part in ("expert", "router"):
        settings += [f"{part}.train.max_steps={QUICK_STEPS}", f"{part}.train.warmup_steps=0"]

    return settings


def show_plan(study: Study) -> None:
    """Print every training with its steps and FLOPs, and the ratio of costs.

    Raises:
        UserError: the run is not prepared.
    """
    table = Report("Trainings", ["variant, member", "trainings", "steps", "TFLOP each"])
    groups: dict[tuple[str, str], list[Job]] = {}
    total = 0.0
    for job in study.jobs():
        kind = "expert" if job.member.startswith("expert-") else job.member
        groups.setdefault((job.variant.name, kind), []).append(job)
        total += job.flops

    for (variant, kind), group in groups.items():
        job = group[0]
        steps = " ".join(map(str, job.steps))
        table.row(f"{variant}, {kind}", str(len(group)), steps, f"{job.flops / 1e12:.2f}")

    partition = study.costs.partition / study.budget(1.0)
    table.note(
        f"All trainings: {total / 1e12:,.1f} TFLOP. The partition (features of all images and k-means) is "
        f"{partition:.2%} of the largest budget, and charged at every one. The monolith takes as many FLOPs as the "
        "ensemble."
    )
    table.show()


def score(study: Study, options: Namespace, settings: str, before: dict[str, Any]) -> None:
    """Sample from everything that is trained, score the images and write the results, with those ``before``."""
    experiment = study.experiment
    manifest = study.main.manifest
    judge = Judge(study.main, [experiment.prepare.features, OTHER, PLAIN], study.root / "features")
    merged = {}
    for point in (*map(Point.from_dict, before["points"]), *collect(study, options, judge)):
        merged[point.key] = point

    points = list(merged.values())
    features = experiment.prepare.features.name
    figures = figures_of(points, features) | judge.floors()
    figures["num_images"] = manifest.num_samples
    figures["num_clusters"] = manifest.num_clusters
    figures["num_held_out"] = len(judge.held_out_images)
    figures["num_generated"] = options.num
    figures["guidance_scale"] = options.guidance
    origin = origin_of_results()
    commits = dict.fromkeys([*before["commit"].split(), origin["commit"]])
    origin["commit"] = " ".join(commits)
    document: dict[str, Any] = {"settings": settings, "features": [features, OTHER.name], "figures": figures}
    document["points"] = list(map(Point.to_dict, points))
    results = Results(document)
    figure = study.root / "curves.png"
    save_figure(figure, curves_figure(results))
    print(f"figure: {figure}")
    tables = tables_of(results)
    for table in tables:
        table.show()

    write_results(options.json, tables, origin, document)


def earlier(path: Path | None, settings: str) -> dict[str, Any]:
    """Read the results to continue; without points if there are none, or if they cannot be continued.

    Raises:
        UserError: they are of other settings.
    """
    nothing: dict[str, Any] = {"commit": "", "points": []}
    if path is None or not path.exists():
        return nothing

    found = read_json(path, "the results so far", "move it away")
    if found.get("settings") != settings:
        raise UserError(f"--json {path}: holds results of other settings; give another file, or move it away")

    return found


def collect(study: Study, options: Namespace, judge: Judge) -> list[Point]:
    """Sample and score."""
    experiment = study.experiment
    settings = Settings(options.num, experiment.sample.num_steps, options.guidance, experiment.seed)
    wanted = {*HEADLINE, *options.methods}
    where: list[tuple[Variant, int, float]] = []
    tasks: list[Task] = []
    for variant, seed, share in study.points():
        is_largest = variant.name == "main" and share == max(variant.budgets)
        folder = study.at_budget(variant, seed, share).root
        for method in METHODS:
            is_sampled = method.name in wanted and (method.curve or is_largest)
            if is_sampled and method.model in TRAIN[variant.train]:
                where.append((variant, seed, share))
                tasks.append(Task(method, folder, study.prepared(variant), settings, folder / "samples"))

    points = []
    for (variant, seed, share), task, found in zip(where, tasks, sample_all(tasks, options.jobs), strict=True):
        method = task.method
        features = judge.features(found.images)
        scores = judge.scores(features[PLAIN.name])
        scores |= study.losses(variant, seed, share, method.model)
        scores |= found.cost
        tflop = study.budget(share) / 1e12
        kid = judge.distances(features)
        points.append(Point(variant.name, seed, share, tflop, method.name, kid, scores, variant.branch_at))

    return points


if __name__ == "__main__":
    run(main)
