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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, call, load, origin_of_results, parse, parser, run, save_figure
from flop_report import Results, curves_figure, label_of, tables_of
from flop_sampling import METHODS, Settings, Task, sample_all
from flop_scores import HEADLINE, OTHER, PLAIN, Judge, Point, figures_of
from flop_training import TRAIN, Job, Study, Variant, are_shares, variants_of
from jaxtyping import UInt8
from torch.utils.benchmark import Timer

from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, atomic_write_text, read_json, sha256_json
from ddm_lightning.core.formatting import format_duration
from ddm_lightning.core.grids import labelled_grid, save_png, scale_of
from ddm_lightning.flow.randomness import keyed_generator

QUICK_STEPS = 20
QUICK_NUM = 64
QUICK_SAMPLING_STEPS = 8
NUM_SHOWN = 16
"""Images of each method in the figure of samples."""
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
        default=[method.name for method in METHODS],
        choices=[method.name for method in METHODS],
        metavar="NAME",
        help=f"sample by these and {', '.join(HEADLINE)} only (all)",
    )
    cli.add_argument("--only", choices=("train", "score"), help="only train, or only score what is trained")
    cli.add_argument("--plan", action="store_true", help="print the trainings and their cost, and stop")
    options = parse(cli, arguments)
    if options.quick:
        options.num = min(options.num, QUICK_NUM)
        options.overrides = [*options.overrides, *_quick(options)]

    budgets = sorted(set(options.budgets))
    if not are_shares(budgets):
        raise UserError(f"--budgets {' '.join(map(str, options.budgets))}: give shares above 0 and at most 1")

    check_experiment(load(options), options.config)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    study = Study(options, [Variant("main", budgets=budgets, seeds=seeds), *variants_of(options.variants)])
    if options.plan:
        show_plan(study, options.jobs)
        return

    study.prepare()
    show_plan(study, options.jobs)
    experiment = asdict(study.experiment)
    described = [experiment[key] for key in _SETTINGS]
    settings = sha256_json([*described, study.experiment.sample.num_steps, options.num, options.guidance])
    before = earlier(options.json, settings)
    if options.only != "score":
        study.train(options.jobs)

    if options.only != "train":
        score(study, options, settings, before)


def _quick(options: Namespace) -> list[str]:
    """Settings of ``--quick``: few steps, in a folder of their own."""
    call("prepare", options)
    folder = Path(load(options).run_dir) / "quick"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "prepared").exists():
        (folder / "prepared").symlink_to(Path("..") / "prepared", target_is_directory=True)

    settings = [f"run_dir={folder}", f"sample.num_steps={QUICK_SAMPLING_STEPS}"]
    for part in ("expert", "router"):
        settings += [f"{part}.train.max_steps={QUICK_STEPS}", f"{part}.train.warmup_steps=0"]

    return settings


def show_plan(study: Study, num_jobs: int) -> None:
    """Print every training with its steps and FLOPs, the ratio of costs, and the hours left.

    Raises:
        UserError: the run is not prepared.
    """
    rate = measured_rate(study)
    jobs = study.jobs()
    table = Report("Trainings", ["variant, member", "seeds", "steps", "TFLOP each"])
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        kind = "expert" if job.member.startswith("expert-") else job.member
        groups.setdefault((job.variant.name, kind), []).append(job)

    for (variant, kind), group in groups.items():
        steps = " ".join(f"{steps:,}" for steps in group[0].steps)
        num_seeds = len({job.seed for job in group})
        num_members = len(group) // num_seeds
        times = f" × {num_members}" if num_members > 1 else ""
        table.row(f"{variant}, {kind}{times}", str(num_seeds), steps, f"{group[0].flops / 1e12:.2f}")

    equal_steps = study.expert_flops
    total = sum(job.flops for job in jobs)
    left = total - sum(study.done(job) for job in jobs)
    table.note(
        f"The ensemble costs {study.budget(1.0) / equal_steps:.4f} of a monolith of as many steps: the router adds "
        f"{study.router_flops / equal_steps:.2%}, the partition {study.costs.partition / equal_steps:.2%} (features of "
        "all images and k-means, paid once and charged at every budget). The monolith takes the same FLOPs in more "
        "steps."
    )
    table.note(
        f"All trainings: {total / 1e12:,.1f} TFLOP, {left / 1e12:,.1f} of them left: about "
        f"{format_duration(left / rate / num_jobs)} at {rate / 1e9:.0f} GFLOP/s in each of {num_jobs} processes."
    )
    table.show()


def measured_rate(study: Study) -> float:
    """Training FLOPs per second of one thread, measured on an expert."""
    member = study.main.member("expert-0")
    num = member.batch_size
    inputs = torch.randn(num, *study.main.manifest.x_shape), torch.rand(num), None
    names = {"network": member.build_network().train(), "inputs": inputs}
    timer = Timer("network(*inputs).square().mean().backward()", globals=names)  # in one thread
    return num * study.costs.expert / timer.blocked_autorange(min_run_time=2.0).mean


def score(study: Study, options: Namespace, settings: str, before: dict[str, Any]) -> None:
    """Sample from everything that is trained, score the images and write the results, with those ``before``."""
    experiment = study.experiment
    manifest = study.main.manifest
    judge = Judge(study.main, [experiment.prepare.features, OTHER, PLAIN], study.root / "features")
    points, images = collect(study, options, judge)
    merged = {point.key: point for point in [*map(Point.from_dict, before["points"]), *points]}
    points = list(merged.values())
    budget = study.budget(1.0)
    figures = figures_of(points, experiment.prepare.features.name) | {
        "num_images": manifest.num_samples,
        "num_clusters": manifest.num_clusters,
        "num_held_out": sum(cluster.held_out for cluster in manifest.clusters),
        "num_generated": options.num,
        "num_sampling_steps": experiment.sample.num_steps,
        "guidance_scale": options.guidance,
        **judge.floors(),
        "router_share": study.router_flops / budget,
        "partition_share": study.costs.partition / budget,
    }
    origin = origin_of_results()
    commits = dict.fromkeys([*before["commit"].split(), origin["commit"]])
    origin["commit"] = " ".join(commits)
    document = {
        **origin,
        "settings": settings,
        "features": [experiment.prepare.features.name, OTHER.name],
        "figures": figures,
        "points": [point.to_dict() for point in points],
    }
    results = Results(document)
    folder = study.root / "report"
    save_figure(folder / "curves.png", curves_figure(results))
    rows = [(label_of(name), list(found[:NUM_SHOWN])) for name, found in images.items()]
    grid = labelled_grid(rows, scale_of(rows[0][1][0]), "The same noise for every method", manifest.attribution)
    save_png(folder / "samples.png", grid)
    print(f"figures: {folder}")
    tables = tables_of(results)
    for table in tables:
        table.show()

    if options.json is not None:
        atomic_write_json(options.json, document)
        parts = [table.markdown({}) for table in tables[:-1]]
        parts.append(tables[-1].markdown(origin))
        atomic_write_text(options.json.with_suffix(".md"), "\n".join(parts))
        print(f"results: {options.json}, {options.json.with_suffix('.md')}")


def earlier(path: Path | None, settings: str) -> dict[str, Any]:
    """Read the results to continue; without points if there are none, or if they cannot be continued.

    Raises:
        UserError: they are of other settings.
    """
    nothing: dict[str, Any] = {"commit": "", "points": []}
    if path is None or not path.exists():
        return nothing

    found = read_json(path, "the results so far", "move it away")
    if "settings" not in found:  # older results lack what intervals need
        return nothing
    if found["settings"] != settings:
        raise UserError(f"--json {path}: holds results of other settings; give another file, or move it away")

    return found


def collect(
    study: Study, options: Namespace, judge: Judge
) -> tuple[list[Point], dict[str, UInt8[np.ndarray, "n h w 3"]]]:
    """Sample and score.

    Returns:
        Points, and images of the first seed at the largest budget by method.
    """
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

    order = torch.randperm(len(judge.held_out_images), generator=keyed_generator(0, "shown"))
    shown = {"held-out images": judge.held_out_images[order.numpy()]}
    points = []
    for (variant, seed, share), task, found in zip(where, tasks, sample_all(tasks, options.jobs), strict=True):
        name = task.method.name
        features = judge.features(found.images)
        scores = judge.scores(features[PLAIN.name])
        scores |= study.losses(variant, seed, share, task.method.model)
        scores |= found.cost
        tflop = study.budget(share) / 1e12
        kid = judge.distances(features)
        points.append(Point(variant.name, seed, share, tflop, name, kid, scores, variant.branch_at))
        if variant.name == "main" and seed == options.first_seed and share == max(variant.budgets):
            shown[name] = found.images

    return points, shown


if __name__ == "__main__":
    run(main)
