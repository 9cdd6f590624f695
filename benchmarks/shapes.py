"""Images of many shapes: training on aspect buckets, or on squares cut from the same images, scored by shape.

Both train for the same steps on the same data and captions; missing members are trained first. Both then draw images of
each shape for the captions of its held-out images, which the squares' ensemble has never seen in training.

    python benchmarks/shapes.py --json benchmarks/results/shapes.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from common import Report, call, load, parse, parser, run
from flop_sampling import features_of
from flop_scores import ratio

from ddm_lightning import Run
from ddm_lightning.evaluation.image_sets import ShardImages
from ddm_lightning.evaluation.metrics.features import KernelDistance, kernel_distance
from ddm_lightning.members.run import Run as OpenRun
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN

QUICK = ("expert.train.max_steps=20", "router.train.max_steps=20", "sample.num_steps=2")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", config="experiments/shapes_4x.yaml")
    cli.add_argument("--num", type=int, default=128, help="images of each shape")
    options = parse(cli, arguments)
    if options.quick:
        options.overrides += [*QUICK, "run_dir=runs/shapes_quick"]

    data = OpenRun(load(options))
    folder = f"run_dir={data.experiment.run_dir}_square"
    ways = {"buckets": (), "squares": ("prepare.images.buckets=null", "sample.size=null", folder)}
    ensembles = {}
    for name, own in ways.items():
        call("fit", options, *own)
        overrides = [*options.overrides, *own]
        ensembles[name] = Run(options.config, overrides).ensemble()

    held_out = ShardImages(data.folder.shards, data.manifest, HELD_OUT)
    train = ShardImages(data.folder.shards, data.manifest, TRAIN)
    network = data.experiment.prepare.features
    kept = data.folder.root / "shapes"
    kept.mkdir(exist_ok=True)
    report = Report(
        "Aspect buckets against square crops",
        ["shape", "training images", "held out", "buckets", "squares", "ratio", "training images' own"],
    )
    found: dict[str, list[KernelDistance]] = {}
    shares = []
    for bucket in data.manifest.buckets:
        rows = held_out.sections[bucket]
        chosen = np.linspace(rows.start, rows.stop, options.num, endpoint=False).astype(int).tolist()
        prompts = held_out.column(chosen, "caption")
        sets = {}
        for name, ensemble in ensembles.items():
            made = ensemble(prompts, seed=0, output_type="np", height=bucket.height, width=bucket.width, exact=True)
            sets[name] = (255 * made.images).round().astype(np.uint8)

        sets["floor"] = train.images(train.sections[bucket])
        real = features_of(held_out.images(rows), network, kept)
        distances = {}
        for name, images in sets.items():
            distances[name] = kernel_distance(features_of(images, network, kept), real)
            found.setdefault(name, []).append(distances[name])

        shares.append(len(rows))
        counts = [len(sets["floor"]), len(rows)]
        add_row(report, bucket.name, counts, distances)

    whole = {name: averaged(each, shares) for name, each in found.items()}
    add_row(report, "all", [train.num, held_out.num], whole)
    report.note(
        f"KID × 1000 ({network.name}), lower is better; {options.num} images of each shape; `all` weighs shapes by "
        "held-out images. The interval is over images alone: one training each."
    )
    report.finish(options.json)


def averaged(distances: Sequence[KernelDistance], weights: Sequence[int]) -> KernelDistance:
    """Weighted mean of the shapes' distances."""
    value = np.average([distance.value for distance in distances], weights=weights)
    halves = np.average(np.stack([distance.halves for distance in distances]), axis=0, weights=weights)
    return KernelDistance(float(value), torch.from_numpy(halves))


def add_row(report: Report, shape: str, counts: Sequence[int], distances: Mapping[str, KernelDistance]) -> None:
    """Add one shape's row and figures."""
    over = ratio([distances["buckets"]], [distances["squares"]])
    report.figures |= over.figures(f"buckets_over_squares_{shape}")
    cells = []
    for name, distance in distances.items():
        report.figures[f"kid_{name}_{shape}"] = distance.value
        cells.append(f"{1000 * distance.value:.2f}")

    cells.insert(2, str(over))
    report.row(shape, *map("{:,}".format, counts), *cells)


if __name__ == "__main__":
    run(main)
