"""The ensemble beside a monolith of the same training FLOPs: kernel distances of their images to held-out ones.

Trains what is missing: the ensemble as ``fit`` does, then the monolith with the members' total measured FLOPs, the
router's included. Then every method draws the same number of images from the same noise for the same held-out
conditions. Features are EfficientNet-Lite0's, the distance is KID: no FID.

    python benchmarks/flop_matched.py -c experiments/emoji_4x.yaml --json benchmarks/results/flop_matched.json

``--quick`` draws few images in few steps from what is trained; if anything is not, it trains all of it for a few
steps, in a folder of its own, which shows that FLOPs match but says nothing of quality.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from common import Report, call, console, load, parse, parser, progress, run, save_figure, use_all_threads
from drawing import METHODS, Cache, Drawn, Method, Settings, draw, real_features
from jaxtyping import UInt8
from matplotlib.figure import Figure
from monolith import budget, check_monolith, fit_monolith, monolith_flops
from rich.progress import TaskID
from split import Split, read_split
from torch import Tensor

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core.devices import resolve_accelerator
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import IMAGE_ENCODERS, METRICS
from ddm_lightning.ensemble.load import load_ensemble, load_single
from ddm_lightning.evaluation.metrics.kid import KernelDistance
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.member import MONOLITH, ROUTER
from ddm_lightning.members.run_folder import RunFolder, open_run
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, Manifest

QUICK_NUM, QUICK_SAMPLING_STEPS = 64, 20
# Steps of each member that --quick trains.
QUICK_STEPS = 20
NUM_SHOWN = 12
REAL = "real images"


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    made = parser(__doc__ or "")
    made.add_argument("--num", type=int, default=None, help=f"images a method (1000; {QUICK_NUM} with --quick)")
    made.add_argument("--guidance", type=float, default=1.0, metavar="SCALE", help="classifier-free guidance (1: none)")
    options = parse(made, arguments)
    num = options.num or (QUICK_NUM if options.quick else 1000)
    if num < NUM_SHOWN:
        raise UserError(f"--num {num}: must be at least {NUM_SHOWN}")
    experiment = load(options)
    experiment.sample = replace(experiment.sample, guidance_scale=options.guidance)
    check_experiment(experiment, options.config)
    experiment, folder = _trained(experiment, options)
    use_all_threads()
    num_steps = experiment.sample.num_steps
    num_steps = min(num_steps, QUICK_SAMPLING_STEPS) if options.quick else num_steps
    settings = Settings(num, num_steps, options.guidance, experiment.seed)
    _compare(experiment, folder, settings, options)


def _trained(experiment: Experiment, options: Namespace) -> tuple[Experiment, RunFolder]:
    """The experiment with a finished ensemble and a finished monolith of the same FLOPs."""
    folder, ours = RunFolder.of(experiment), []
    if options.quick and not (folder.ensemble.exists() and folder.is_finished(MONOLITH)):
        call("prepare", options)
        quick = RunFolder(folder.root / "benchmarks" / "quick")
        quick.root.mkdir(parents=True, exist_ok=True)
        if not quick.prepared.exists():
            quick.prepared.symlink_to(os.path.relpath(folder.prepared, quick.root), target_is_directory=True)
        ours = [f"run_dir={quick.root}"]
        ours += [
            f"{role}.train.{key}"
            for role in ("expert", "router")
            for key in (f"max_steps={QUICK_STEPS}", "warmup_steps=0")
        ]
        sample = experiment.sample
        experiment, folder = load(options, *ours), quick
        experiment.sample = sample
    if not folder.ensemble.exists():
        call("fit", options, *ours)
    open_run(experiment, create=False)
    spent = budget(experiment, folder)
    check_monolith(folder, spent.monolith_steps)
    if not folder.is_finished(MONOLITH):
        print(f"monolith: {spent.monolith_steps} steps cost the ensemble's {spent.ensemble:.3e} FLOP")
        fit_monolith(experiment, folder, spent.monolith_steps)
    return experiment, folder


def _compare(experiment: Experiment, folder: RunFolder, settings: Settings, options: Namespace) -> None:
    manifest = Manifest.read(folder.root)
    held_out, train = (read_split(folder, manifest, side) for side in (HELD_OUT, TRAIN))
    device = "cuda" if resolve_accelerator(experiment.island.accelerator) == "gpu" else "cpu"
    models = {
        False: (load_ensemble(folder.root, device), sha256_file(folder.ensemble)),
        True: (load_single(folder.artifact(MONOLITH), device), sha256_file(folder.artifact(MONOLITH) / "member.json")),
    }
    encoder = IMAGE_ENCODERS.build(experiment.prepare.image_encoder.name, experiment.prepare.image_encoder.params)
    cache = Cache(folder.root / "benchmarks" / "flop_matched")
    rows = _condition_rows(held_out, settings)
    condition = held_out.condition(experiment.condition.kind)
    condition = None if condition is None else condition.rows(rows)

    real = real_features(cache, "held-out", held_out.x_0, encoder)
    half = torch.randperm(len(train), generator=keyed_generator(settings.seed, "floor"))[: len(train) // 2]
    half = half[:QUICK_NUM] if options.quick else half
    floor = _kid(real_features(cache, "half-of-train", train.x_0[half], encoder), real)
    drawn: dict[str, Drawn] = {}
    methods = [method for method in METHODS if not (method.control and options.quick)]
    with progress(console()) as bars:
        tasks = [bars.add_task(method.name, total=settings.num, start=False) for method in methods]
        for method, task in zip(methods, tasks, strict=True):
            bars.start_task(task)
            loaded, weights = models[method.monolith]

            def advance(done: float, task: TaskID = task) -> None:
                bars.update(task, completed=round(done))

            drawn[method.name] = draw(
                method,
                loaded,
                weights,
                condition,
                settings,
                encoder,
                cache,
                advance,
            )
    distances = {name: _kid(found.features, real) for name, found in drawn.items()}
    report = _report(methods, distances, floor, drawn, settings, len(held_out))
    _add_training(report, experiment, folder)
    path = folder.root / "benchmarks" / "flop_matched.png"
    # The bar beside the held-out images is that of training images: what a perfect model would reach.
    images = {REAL: encoder.decode(held_out.x_0[rows[:NUM_SHOWN]])}
    images |= {name: found.images[:NUM_SHOWN] for name, found in drawn.items()}
    save_figure(path, comparison_figure({REAL: floor, **distances}, images, manifest.attribution))
    report.show(console())
    print(f"figure: {path}")
    report.write(options.json)


def _kid(generated: Tensor, real: Tensor) -> KernelDistance:
    metric = METRICS.build("kid", {})
    metric.update(real, real=True)
    metric.update(generated, real=False)
    distance: KernelDistance = metric.compute()
    return distance


def _condition_rows(held_out: Split, settings: Settings) -> Tensor:
    """Held-out samples whose conditions are used: all of them again and again, in an order of their own."""
    order = torch.randperm(len(held_out), generator=keyed_generator(settings.seed, "conditions"))
    return order.repeat(-(-settings.num // len(order)))[: settings.num]


def _report(
    methods: Sequence[Method],
    distances: Mapping[str, KernelDistance],
    floor: KernelDistance,
    drawn: Mapping[str, Drawn],
    settings: Settings,
    num_held_out: int,
) -> Report:
    report = Report(
        f"KID on EfficientNet-Lite0 features, {settings.num} images against {num_held_out} held-out ones",
        ["method", "KID", "less the monolith's", "experts a step", "GFLOP a step"],
    )
    figures: dict[str, float] = {}
    for method in methods:
        found, images = distances[method.name], drawn[method.name]
        other = "monolith_ancestral" if method.solver == "ancestral" else "monolith"
        difference, spread = found.minus(distances[other])
        report.row(
            f"{method.name} ({method.solver})",
            f"{found.value:.4f} ± {found.spread:.4f}",
            "" if method.monolith else f"{difference:+.4f} ± {spread:.4f}",
            f"{images.experts_a_step:.2f}",
            f"{images.gflop_a_step:.4f}",
        )
        figures |= {f"kid_{method.name}": found.value, f"kid_spread_{method.name}": found.spread}
        figures[f"gflop_a_step_{method.name}"] = images.gflop_a_step
        figures[f"experts_a_step_{method.name}"] = images.experts_a_step
        if not method.monolith:
            figures |= {f"kid_{method.name}_minus_{other}": difference}
            figures |= {f"kid_spread_{method.name}_minus_{other}": spread}
    report.row("half of the training images", f"{floor.value:.4f} ± {floor.spread:.4f}", "", "", "")
    report.figures = {
        **figures,
        "kid_floor": floor.value,
        "kid_spread_floor": floor.spread,
        "num_images": settings.num,
        "num_held_out": num_held_out,
        "num_steps": settings.num_steps,
        "guidance_scale": settings.guidance_scale,
    }
    report.note(
        f"{settings.num_steps} steps, guidance {settings.guidance_scale:g}, the same noise and held-out conditions for "
        "all; ± is one standard error. The monolith's KID is taken off under the same kind of solver, against the same "
        "held-out images, so that the difference is surer than either. The clusters were made by the same network's "
        "features."
    )
    return report


def _add_training(report: Report, experiment: Experiment, folder: RunFolder) -> None:
    spent = budget(experiment, folder)
    ratio = spent.ensemble / monolith_flops(experiment, folder)
    report.figures |= {
        "ensemble_over_monolith_flops": ratio,
        "training_tflop_ensemble": spent.ensemble / 1e12,
        "training_tflop_router": spent.members.get(ROUTER, 0.0) / 1e12,
        "monolith_steps": spent.monolith_steps,
    }
    router = spent.members.get(ROUTER, 0.0) / spent.ensemble
    report.note(
        f"Training: the ensemble's {spent.ensemble:.3e} FLOP are {ratio:.4f} of the monolith's in "
        f"{spent.monolith_steps} steps; the router is {router:.1%} of the ensemble's."
    )


def comparison_figure(
    distances: Mapping[str, KernelDistance],
    images: Mapping[str, UInt8[np.ndarray, "n h w 3"]],
    attribution: str,
) -> Figure:
    """A row for each name: its distance as a bar with the standard error, and some of its images.

    Args:
        distances: by name; the first one is what real images reach.
        images: the same names, as many images of one size for each.
        attribution: the credit that real images ask for.
    """
    names = list(images)
    _, height, width, _ = images[names[0]].shape
    num = len(images[names[0]])
    row = 0.9  # inches
    figure = Figure(figsize=(5 + num * row * width / height, len(names) * row + 0.8), layout="constrained")
    bars, strips = figure.subplots(1, 2, width_ratios=[4, num * row * width / height], sharey=True)
    bars.barh(
        range(len(names)),
        [distances[name].value for name in names],
        xerr=[distances[name].spread for name in names],
        color=["0.8", *("tab:orange" if "monolith" in name else "tab:blue" for name in names[1:])],
        capsize=3,
        height=0.6,
    )
    bars.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    bars.set_xlabel("KID on EfficientNet-Lite0 features, less is better")
    gap = ((1, 1), (1, 1), (0, 0))
    mosaic = [np.concatenate([np.pad(image, gap, constant_values=255) for image in images[name]], 1) for name in names]
    strips.imshow(
        np.concatenate(mosaic), extent=(0, num, len(names) - 0.5, -0.5), aspect="auto", interpolation="nearest"
    )
    strips.set_xticks([])
    strips.set_xlabel(attribution, fontsize=7)
    return figure


if __name__ == "__main__":
    sys.exit(run(main))
