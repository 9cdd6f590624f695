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

import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, call, command, commit, device, load, parse, parser, read_variants, run
from flop_report import (
    Results,
    branch_table,
    curves_figure,
    loss_table,
    page,
    strategy_table,
    strips_figure,
    variant_table,
    write_figures,
)
from flop_sampling import METHODS, Settings, Task, sample_all
from flop_scores import HEADLINE, OTHER, PLAIN, Judge, Point, figures_of
from flop_training import TRAIN, Study, Variant
from torch.utils.benchmark import Timer

from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, atomic_write_text, read_json, sha256_json
from ddm_lightning.core.formatting import format_duration
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.member import STUDENT

QUICK_STEPS = 20
QUICK_NUM = 64
QUICK_SAMPLING_STEPS = 8
MIN_NUM = 16
_SETTINGS = ("prepare", "condition", "expert", "router")
BUDGETS = "shares above 0 and at most 1"


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    made = parser(__doc__ or "")
    made.add_argument(
        "--seeds", type=int, default=1, help="trainings of every member, with seeds from --first-seed (1)"
    )
    made.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="the lowest seed (0)")
    made.add_argument(
        "--budgets", type=float, nargs="+", default=[1.0], metavar="SHARE", help="shares of the experiment's steps (1)"
    )
    made.add_argument("--num", type=int, default=2000, help=f"images per method (2000; {QUICK_NUM} with --quick)")
    made.add_argument("--guidance", type=float, default=1.0, metavar="SCALE", help="classifier-free guidance (1: none)")
    made.add_argument("--jobs", type=int, default=2, help="members trained, or methods sampled, at once (2)")
    made.add_argument(
        "--variants", nargs="+", default=[], metavar=("FILE", "NAME"), help="further trainings to compare"
    )
    made.add_argument(
        "--methods",
        nargs="+",
        choices=[method.name for method in METHODS],
        metavar="NAME",
        help=f"sample by these and {', '.join(HEADLINE)} only (all)",
    )
    made.add_argument("--only", choices=("train", "score"), help="only train, or only score what is trained")
    made.add_argument("--plan", action="store_true", help="print the trainings and their cost, and stop")
    options = parse(made, arguments)
    if options.quick:
        options.num = min(options.num, QUICK_NUM)
        options.overrides = [*options.overrides, *_quick(options)]
    if options.num < MIN_NUM or options.seeds < 1 or options.jobs < 1:
        raise UserError(f"--num must be at least {MIN_NUM}, --seeds and --jobs at least 1")
    budgets = tuple(sorted(set(options.budgets)))
    if not are_shares(budgets):
        raise UserError(f"--budgets {' '.join(map(str, options.budgets))}: give {BUDGETS}")
    check_experiment(load(options), options.config)
    mains = Variant("main", budgets=budgets, seeds=tuple(range(options.first_seed, options.first_seed + options.seeds)))
    study = Study(options, [mains, *variants_of(options.variants)])
    if options.plan:
        _ = study.main.manifest  # --plan needs its sizes; where there is none, this says so
    else:
        study.prepare()
    show_plan(study, options.jobs)
    if options.plan:
        return
    described = [asdict(study.experiment)[key] for key in _SETTINGS]
    settings = sha256_json([*described, study.experiment.sample.num_steps, options.num, options.guidance])
    before = earlier(options.json, settings)
    if options.only != "score":
        study.train(options.jobs)
    if options.only != "train":
        score(study, options, settings, before)


def are_shares(budgets: Sequence[Any]) -> bool:
    """Whether all budgets are shares of the experiment's steps."""
    return all(isinstance(share, (int, float)) and 0 < share <= 1 for share in budgets)


def _quick(options: Namespace) -> list[str]:
    """Settings of ``--quick``: few steps, in a folder of their own."""
    run_dir = Path(load(options).run_dir)
    call("prepare", options)
    shorter = [
        f"{part}.train.{key}" for part in ("expert", "router") for key in (f"max_steps={QUICK_STEPS}", "warmup_steps=0")
    ]
    sampling = [f"sample.num_steps={QUICK_SAMPLING_STEPS}"]
    quick = run_dir / "quick"
    quick.mkdir(parents=True, exist_ok=True)
    if not (quick / "prepared").exists():
        (quick / "prepared").symlink_to(Path("..") / "prepared", target_is_directory=True)
    return [f"run_dir={quick}", *shorter, *sampling]


def variants_of(words: Sequence[str]) -> list[Variant]:
    """Read the variants named behind ``FILE``, or all of them, and check their values.

    Raises:
        UserError: a bad file (see ``read_variants``), or a bad value.
    """
    variants = read_variants(words, Variant)
    for one in variants:
        problems = {
            f"train = {one.train!r} is none of {', '.join(TRAIN)}": one.train not in TRAIN,
            f"budgets = {list(one.budgets)}: give {BUDGETS}": not are_shares(one.budgets),
            f"branch_at = {one.branch_at}: give 0 or one of the shares": one.branch_at != 0
            and not are_shares([one.branch_at]),
            "branch_at is for experts; train = student has none": one.train == STUDENT and one.branch_at != 0,
            f"seeds = {list(one.seeds)}: give whole numbers": not all(isinstance(seed, int) for seed in one.seeds),
            "its name must be of letters, digits and _": not re.fullmatch(r"\w+", str(one.name)),
        }
        if found := [problem for problem, holds in problems.items() if holds]:
            raise UserError(f"--variants {words[0]}: {one.name}: {found[0]}")
    return variants


def show_plan(study: Study, num_jobs: int) -> None:
    """Print every training with its steps and FLOPs, the ratio of costs, and the hours left."""
    jobs, costs = study.jobs(), study.costs
    table = Report("Trainings", ["variant, member", "seeds", "steps", "TFLOP each"])
    groups: dict[tuple[str, str], list] = {}
    for job in jobs:
        kind = "expert" if job.member.startswith("expert-") else job.member
        groups.setdefault((job.variant.name, kind), []).append(job)
    for (variant, kind), same in groups.items():
        steps = " ".join(f"{steps:,}" for steps in same[0].steps)
        count = len({job.member for job in same})
        name = f"{variant}, {kind}{f' × {count}' if count > 1 else ''}"
        table.row(name, str(len({job.seed for job in same})), steps, f"{same[0].flops / 1e12:.2f}")
    budget, experiment = study.budget(1.0), study.experiment
    train = experiment.router.train
    router = costs.router * train.global_batch_size * train.max_steps
    equal_steps = costs.expert * experiment.expert.train.global_batch_size * experiment.expert.train.max_steps
    total, left = sum(job.flops for job in jobs), sum(job.flops - study.done(job) for job in jobs)
    rate = measured_rate(study)
    table.note(
        f"The ensemble costs {budget / equal_steps:.4f} of a monolith of as many steps: the router adds "
        f"{router / equal_steps:.2%}, the partition {costs.partition / equal_steps:.2%} (features of all images and "
        "k-means, paid once and charged at every budget). The monolith takes the same FLOPs in more steps."
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
    points, images, floors = collect(study, options)
    ours = {(point.variant, point.seed, point.share, point.method) for point in points}
    kept = [Point.from_dict(one) for one in before["points"]]
    points += [one for one in kept if (one.variant, one.seed, one.share, one.method) not in ours]
    experiment, costs = study.experiment, study.costs
    manifest = study.main.manifest
    train, budget = experiment.router.train, study.budget(1.0)
    figures = figures_of(points, experiment.prepare.features.name) | {
        "num_images": manifest.num_samples,
        "num_clusters": manifest.num_clusters,
        "num_held_out": sum(cluster.held_out for cluster in manifest.clusters),
        "num_generated": options.num,
        "num_sampling_steps": experiment.sample.num_steps,
        "guidance_scale": options.guidance,
        **floors,
        "router_share": costs.router * train.global_batch_size * train.max_steps / budget,
        "partition_share": costs.partition / budget,
    }
    commits = dict.fromkeys([*before["commit"].split(), commit()])
    origin = {"commit": " ".join(commits), "device": device(), "command": command()}
    networks = [experiment.prepare.features.name, OTHER.name]
    document = {
        **origin,
        "settings": settings,
        "features": networks,
        "figures": figures,
        "points": [point.to_dict() for point in points],
    }
    results = Results(document)
    tables = [strategy_table(results), variant_table(results)]
    if any("held_out_loss" in point.scores for point in points):
        tables.append(loss_table(results))
    if any(point.branch_at for point in points):
        tables.append(branch_table(results))
    plots = {
        "Curves: KID against training FLOPs": curves_figure(results),
        "Samples: the same noise for every method": strips_figure(images, manifest.attribution),
    }
    folder = study.root / "report"
    for path in write_figures(folder, plots):
        print(f"figure: {path}")
    title = f"Equal training FLOPs: {experiment.name}"
    atomic_write_text(folder / "report.html", page(title, tables, plots, manifest.attribution, str(origin)))
    print(f"page: {folder / 'report.html'}")
    for table in tables:
        table.show()
    if options.json is not None:
        atomic_write_json(options.json, document)
        text = [table.markdown(origin if table is tables[-1] else {}) for table in tables]
        atomic_write_text(options.json.with_suffix(".md"), "\n".join(text))
        print(f"results: {options.json}, {options.json.with_suffix('.md')}")


def earlier(path: Path | None, settings: str) -> dict[str, Any]:
    """Read the results to continue; without points if there are none, or if they cannot be continued.

    Raises:
        UserError: they are of other settings.
    """
    found = read_json(path, "the results so far", "move it away") if path is not None and path.exists() else {}
    if "settings" not in found:  # older results lack what intervals need
        return {"commit": "", "points": []}
    if found["settings"] != settings:
        raise UserError(f"--json {path}: holds results of other settings; give another file, or move it away")
    return found


def collect(study: Study, options: Namespace) -> tuple[list[Point], dict[str, np.ndarray], dict[str, float]]:
    """Sample and score.

    Returns:
        Points, images of the first seed at the largest budget by method, and scores of real images.
    """
    experiment = study.experiment
    num_steps = experiment.sample.num_steps
    settings = Settings(options.num, num_steps, options.guidance, experiment.seed)
    where: list[tuple[Variant, int, float]] = []
    tasks: list[Task] = []
    for variant, seed, share in study.points():
        is_full = variant.name == "main" and share == max(variant.budgets)
        for method in METHODS:
            wanted = (method.curve or is_full) and method.name in (*HEADLINE, *(options.methods or (method.name,)))
            if method.model not in TRAIN[variant.train] or not wanted:
                continue
            where.append((variant, seed, share))
            data, folder = study.prepared(variant), study.at_budget(variant, seed, share).root
            tasks.append(Task(method, folder, data, settings, folder / "samples"))
    sampled = sample_all(tasks, options.jobs)
    judge = Judge(study.main, (experiment.prepare.features, OTHER, PLAIN), study.root / "features")
    points = []
    order = torch.randperm(len(judge.held_out), generator=keyed_generator(0, "shown"))
    shown: dict[str, np.ndarray] = {"held-out images": judge.held_out_images[order.numpy()]}
    for (variant, seed, share), task, found in zip(where, tasks, sampled, strict=True):
        losses = study.losses(variant, seed, share, task.method.model)
        points.append(judge.point(variant, seed, share, study.budget(share), task.method.name, found, losses))
        if variant.name == "main" and seed == options.first_seed and share == max(variant.budgets):
            shown[task.method.name] = found.images
    return points, shown, judge.floors()


if __name__ == "__main__":
    run(main)
