"""Compare an ensemble with a monolith at equal training FLOPs, at several budgets and seeds.

Trains whatever is missing, samples from every method with the same noise, and scores the images against held-out ones.
An interrupted run continues where it stopped. ``--plan`` prints the cost and trains nothing.

    python benchmarks/flop_matched.py -c experiments/mix_4x.yaml --seeds 3 --budgets 0.25 0.5 1
        --json benchmarks/results/flop_matched_mix_4x.json

``--variants FILE NAME…`` adds controls and ablations: trainings under other settings, described in a YAML file such as
``benchmarks/variants_mix.yaml``. ``--quick`` trains each member for 20 steps in a folder of its own: it shows that
everything runs, and says nothing about quality.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Report, call, commit, console, device, load, parse, parser, run
from flop_report import (
    ClusterShares,
    Point,
    curves_figure,
    equal_score_share,
    kid,
    of_method,
    page,
    precision_recall,
    ratio,
    strips_figure,
    write_figures,
    write_results,
)
from flop_sampling import METHODS, Images, Settings, Task, features_of, sample_all
from flop_training import TRAIN, Study, Variant
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from split import read_split

from ddm_lightning.config.experiment import Experiment, PluginConfig
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_write_text
from ddm_lightning.core.formatting import duration
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.member import Member
from ddm_lightning.shards.manifest import HELD_OUT, Manifest
from ddm_lightning.shards.manifest import TRAIN as TRAIN_SPLIT

QUICK_STEPS, QUICK_NUM, QUICK_SAMPLING_STEPS = 20, 64, 8
MIN_NUM = 16
# Training images on which the classifier of clusters is fitted.
NUM_CLASSIFIED = 8000
OTHER = PluginConfig("random-convolutions")
BEST, BASELINE = "bayes", "monolith_ancestral"


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    made = parser(__doc__ or "")
    made.add_argument("--seeds", type=int, default=1, help="trainings of every member, with seeds from 0 (1)")
    made.add_argument(
        "--budgets", type=float, nargs="+", default=[1.0], metavar="SHARE", help="shares of the experiment's steps (1)"
    )
    made.add_argument("--num", type=int, default=2000, help=f"images per method (2000; {QUICK_NUM} with --quick)")
    made.add_argument("--guidance", type=float, default=1.0, metavar="SCALE", help="classifier-free guidance (1: none)")
    made.add_argument("--jobs", type=int, default=2, help="members trained, or methods sampled, at once (2)")
    made.add_argument(
        "--variants", nargs="+", default=[], metavar=("FILE", "NAME"), help="further trainings to compare"
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
    if not all(0 < share <= 1 for share in budgets):
        raise UserError(f"--budgets {' '.join(map(str, options.budgets))}: give shares above 0 and at most 1")
    check_experiment(load(options), options.config)
    mains = Variant("main", budgets=budgets, seeds=tuple(range(options.seeds)))
    study = Study(options, [mains, *read_variants(options.variants)])
    if options.plan and not (study.prepared(mains).prepared / "manifest.json").exists():
        raise UserError(f"{study.prepared(mains).root}: not prepared; run prepare first, which --plan needs for sizes")
    if not options.plan:
        study.prepare()
    show_plan(study, options.jobs)
    if options.plan:
        return
    if options.only != "score":
        study.train(options.jobs)
    if options.only != "train":
        score(study, options)


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


def read_variants(words: Sequence[str]) -> list[Variant]:
    """Read the variants named behind ``FILE``, or all of them.

    Raises:
        UserError: the file is missing or damaged, a key is unknown, or there is no variant of a name.
    """
    if not words:
        return []
    path, names = Path(words[0]), list(words[1:])
    try:
        found: Any = OmegaConf.to_container(OmegaConf.load(path))
        variants = {}
        for name, entry in found.items():
            settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in (entry or {}).items()}
            variants[name] = Variant(name, **settings)
    except (OSError, OmegaConfBaseException, TypeError, AttributeError) as error:
        raise UserError(f"--variants {path}: is no file of variants ({first_line(error)})") from None
    if unknown := [name for name in names if name not in variants]:
        raise UserError(f"--variants {path}: no variant {unknown[0]!r}; known: {', '.join(variants)}")
    if wrong := [one for one in variants.values() if one.train not in TRAIN]:
        raise UserError(f"--variants {path}: {wrong[0].name}: train = {wrong[0].train!r} is none of {', '.join(TRAIN)}")
    return [variants[name] for name in names or variants]


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
    rate = measured_rate(study) if left else 1.0
    table.note(
        f"The ensemble costs {budget / equal_steps:.4f} of a monolith of as many steps: the router adds "
        f"{router / equal_steps:.2%}, the partition {costs.partition / equal_steps:.2%} (features of all images and "
        "k-means, paid once and charged at every budget). The monolith takes the same FLOPs in more steps."
    )
    table.note(
        f"All trainings: {total / 1e12:,.1f} TFLOP, {left / 1e12:,.1f} of them left: about "
        f"{duration(left / rate / num_jobs)} at {rate / 1e9:.0f} GFLOP/s in each of {num_jobs} processes."
    )
    table.show(console())


def measured_rate(study: Study, seconds: float = 2.0) -> float:
    """Training FLOPs per second of one thread, measured on an expert."""
    manifest = Manifest.read(study.prepared(study.variants[0]).root)
    member = Member.resolve("expert-0", study.experiment, manifest)
    network, num = member.build_network().train(), member.batch_size
    threads, steps = torch.get_num_threads(), 0
    torch.set_num_threads(1)
    start = time.monotonic()
    while steps < 2 or time.monotonic() - start < seconds:
        x_t, t = torch.randn(num, *manifest.x_shape), torch.rand(num)
        network(x_t, t, None).square().mean().backward()
        steps += 1
        if steps == 1:
            start = time.monotonic()  # the first allocates
    torch.set_num_threads(threads)
    return (steps - 1) * num * study.costs.expert / (time.monotonic() - start)


def score(study: Study, options: Namespace) -> None:
    """Sample from everything that is trained, score the images and write the results."""
    points, images, floors = collect(study, options)
    experiment = study.experiment
    main_network, other = experiment.prepare.features.name, OTHER.name
    largest = max(point.share for point in points if point.variant == "main")
    figures = figures_of(points, largest, main_network, other)
    held_out = Manifest.read(study.prepared(study.variants[0]).root)
    figures |= {
        "num_images": held_out.num_samples,
        "num_held_out": sum(cluster.held_out for cluster in held_out.clusters),
        "num_generated": options.num,
        "num_sampling_steps": experiment.sample.num_steps,
        "guidance_scale": options.guidance,
        **floors,
        "router_share": study.costs.router
        * experiment.router.train.global_batch_size
        * experiment.router.train.max_steps
        / study.budget(1.0),
        "partition_share": study.costs.partition / study.budget(1.0),
    }
    tables = [strategy_table(points, largest, main_network, other), variant_table(points, main_network)]
    strips = strips_figure(images, held_out.attribution)
    plots = {"Curves: KID against training FLOPs": curves_figure(points, main_network, held_out.num_clusters)}
    plots["Samples: the same noise for every method"] = strips
    title = f"Equal training FLOPs: {experiment.name}"
    origin = f"commit {commit()}; {device()}"
    folder = study.root / "report"
    for path in write_figures(folder, plots):
        print(f"figure: {path}")
    atomic_write_text(folder / "report.html", page(title, tables, plots, held_out.attribution, origin))
    print(f"page: {folder / 'report.html'}")
    for table in tables:
        if table.rows:
            table.show(console())
    tables[0].figures = figures
    if options.json is not None:
        write_results(options.json, tables, points)


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
        own = study.settings_of(variant)
        is_full = variant.name == "main" and share == max(variant.budgets)
        for method in METHODS:
            if method.model not in TRAIN[variant.train] or not (method.curve or is_full):
                continue
            run_folder = study.at_budget(variant, seed, share)
            where.append((variant, seed, share))
            tasks.append(
                Task(
                    method,
                    run_folder.root,
                    study.prepared(variant).root,
                    own.prepare.image_encoder,
                    own.condition.kind,
                    settings,
                    run_folder.root / "samples",
                )
            )
    sampled = sample_all(tasks, options.jobs)
    judge = Judge(study, experiment)
    points = []
    shown: dict[str, np.ndarray] = {"held-out images": judge.held_out_images}
    for (variant, seed, share), task, found in zip(where, tasks, sampled, strict=True):
        points.append(judge.point(variant, seed, share, task, found))
        if variant.name == "main" and seed == 0 and share == max(variant.budgets):
            shown[task.method.name] = found.images
    return points, shown, judge.floors()


class Judge:
    """Score images against the held-out ones of the main experiment.

    Args:
        study: the trainings.
        experiment: the main experiment.
    """

    def __init__(self, study: Study, experiment: Experiment) -> None:
        self.study, self.experiment = study, experiment
        data = study.prepared(study.variants[0])
        manifest = Manifest.read(data.root)
        self.held_out, train = (read_split(data, manifest, side) for side in (HELD_OUT, TRAIN_SPLIT))
        encoder = IMAGE_ENCODERS.build(experiment.prepare.image_encoder.name, experiment.prepare.image_encoder.params)
        order = torch.randperm(len(self.held_out), generator=keyed_generator(0, "shown"))
        images = encoder.decode(self.held_out.x_0)
        self.held_out_images = images[order.numpy()]
        self.networks = {network.name: network for network in (experiment.prepare.features, OTHER)}
        self.stored = study.root / "features"
        self.real = {name: features_of(images, network, self.stored) for name, network in self.networks.items()}
        rows = torch.randperm(len(train), generator=keyed_generator(0, "classifier"))[:NUM_CLASSIFIED]
        self.some_train = encoder.decode(train.x_0[rows])
        other = features_of(self.some_train, OTHER, self.stored)
        self.shares = ClusterShares(other, train.clusters[rows], manifest.priors)

    def point(self, variant: Variant, seed: int, share: float, task: Task, found: Images) -> Point:
        """Score the images of one task."""
        features = {name: features_of(found.images, network, self.stored) for name, network in self.networks.items()}
        distances = {name: kid(features[name], self.real[name]) for name in self.networks}
        scores = precision_recall(features[OTHER.name], self.real[OTHER.name])
        scores |= {"experts_per_step": found.experts_per_step, "gflop_per_image": found.gflop_per_image}
        flops = self.study.budget(share) / 1e12
        shares = self.shares.total_variation(features[OTHER.name])
        return Point(variant.name, seed, share, flops, task.method.name, distances, shares, scores)

    def floors(self) -> dict[str, float]:
        """Scores of real images: what a perfect model would reach."""
        found = {}
        for name, network in self.networks.items():
            found[f"kid_floor_{name}"] = kid(features_of(self.some_train, network, self.stored), self.real[name]).value
        return found | {"shares_tv_floor": self.shares.total_variation(self.real[OTHER.name])}


def figures_of(points: Sequence[Point], largest: float, network: str, other: str) -> dict[str, float]:
    """Named figures of the main comparison; ratios are of mean KIDs over seeds."""
    main = [point for point in points if point.variant == "main"]
    figures: dict[str, float] = {
        "num_seeds": len({point.seed for point in main}),
        "num_budgets": len({point.share for point in main}),
    }
    for method in dict.fromkeys(point.method for point in main):
        ours = of_method(main, method, largest)
        figures[f"kid_{method}"] = sum(p.kid[network].value for p in ours) / len(ours)
        figures[f"shares_tv_{method}"] = sum(p.shares_tv for p in ours) / len(ours)
        if method.startswith("monolith"):
            continue
        theirs = of_method(main, baseline_of(method), largest)
        for prefix, name in (("", network), ("other_features_", other)):
            found = ratio([p.kid[name] for p in ours], [p.kid[name] for p in theirs])
            figures |= {
                f"{prefix}{method}_over_monolith": found.value,
                f"{prefix}{method}_over_monolith_low": found.low,
                f"{prefix}{method}_over_monolith_high": found.high,
            }
    wanted = figures[f"kid_{BASELINE}"]
    curve = {share: of_method(main, BEST, share) for share in sorted({point.share for point in main})}
    flops = [row[0].train_tflop for row in curve.values()]
    scores = [sum(p.kid[network].value for p in row) / len(row) for row in curve.values()]
    share = equal_score_share(flops, scores, wanted)
    return figures | {
        "best_over_monolith": figures[f"{BEST}_over_monolith"],
        "best_over_monolith_other_features": figures[f"other_features_{BEST}_over_monolith"],
        "top1_over_monolith": figures["top1_over_monolith"],
        "flops_for_equal_score": share if share < float("inf") else -1.0,
        "shares_tv_best": figures[f"shares_tv_{BEST}"],
    }


def baseline_of(method: str) -> str:
    """The monolith's method with the same kind of solver."""
    solver = next(one.solver for one in METHODS if one.name == method)
    return "monolith_ancestral" if solver == "ancestral" else "monolith"


def strategy_table(points: Sequence[Point], largest: float, network: str, other: str) -> Report:
    """All methods of the main comparison at the largest budget."""
    main = [point for point in points if point.variant == "main"]
    num_seeds = len({point.seed for point in main})
    table = Report(
        f"Methods at the largest budget, mean of {num_seeds} training seed{'s' if num_seeds > 1 else ''}",
        [
            "method",
            f"KID ({network})",
            "over monolith",
            f"KID ({other})",
            "over monolith ",
            "precision",
            "recall",
            "shares TV",
            "experts per step",
            "GFLOP per image",
        ],
    )

    def mean(rows: Sequence[Point], key: str) -> float:
        return sum(point.scores[key] for point in rows) / len(rows)

    for method in dict.fromkeys(point.method for point in main):
        ours = of_method(main, method, largest)
        theirs = of_method(main, baseline_of(method), largest)
        cells = []
        for name in (network, other):
            cells.append(f"{sum(p.kid[name].value for p in ours) / len(ours):.4f}")
            is_baseline = method == baseline_of(method)
            cells.append("" if is_baseline else str(ratio([p.kid[name] for p in ours], [p.kid[name] for p in theirs])))
        table.row(
            method.replace("_", " "),
            *cells,
            f"{mean(ours, 'precision'):.2f}",
            f"{mean(ours, 'recall'):.2f}",
            f"{sum(p.shares_tv for p in ours) / len(ours):.3f}",
            f"{mean(ours, 'experts_per_step'):.2f}",
            f"{mean(ours, 'gflop_per_image'):.2f}",
        )
    table.note(
        "Ratios are taken under the same kind of solver; brackets hold 95 % bootstrap intervals over seeds and images. "
        f"The clusters were made with {network}; {other} took no part. Shares TV: total variation between the "
        "clusters' shares among the images and the priors."
    )
    return table


def variant_table(points: Sequence[Point], network: str) -> Report:
    """All budgets and variants: KID of the methods that are sampled everywhere."""
    methods = [method.name for method in METHODS if method.curve]
    table = Report(f"KID ({network}) by budget and variant", ["variant", "share of the budget", *methods])
    for variant, share in dict.fromkeys((point.variant, point.share) for point in points):
        cells = []
        for method in methods:
            rows = of_method(points, method, share, variant)
            cells.append(f"{sum(p.kid[network].value for p in rows) / len(rows):.4f}" if rows else "")
        table.row(variant, f"{share:g}", *cells)
    return table


if __name__ == "__main__":
    sys.exit(run(main))
