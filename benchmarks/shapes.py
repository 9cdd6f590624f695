"""Images of many shapes: training on aspect buckets, or on squares cut from the same images, scored by shape.

Both train for the same steps on the same data and captions; missing members are trained first. Both then draw images of
each shape for the captions of its held-out images, which the squares' ensemble has never seen in training.

    python benchmarks/shapes.py --json benchmarks/results/shapes.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from common import Report, call, load, parse, parser, run
from flop_sampling import features_of
from flop_scores import ratio
from jaxtyping import UInt8
from split import encoder_of

from ddm_lightning import Run
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.evaluation.metrics.features import KernelDistance, kernel_distance
from ddm_lightning.members.run import Run as OpenRun
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, shard_name
from ddm_lightning.shards.mds import open_shards

WAYS = ("buckets", "squares")
"""Ensembles that are compared."""
QUICK = ("expert.train.max_steps=20", "router.train.max_steps=20", "sample.num_steps=2")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", config="experiments/shapes_4x.yaml")
    cli.add_argument("--num", type=int, default=128, help="images of each shape")
    options = parse(cli, arguments)
    options.overrides += [*QUICK, "run_dir=runs/shapes_quick"] if options.quick else []
    data = OpenRun(load(options))
    squares = ("prepare.images.buckets=null", "sample.size=null", f"run_dir={data.experiment.run_dir}_square")
    ensembles = {}
    for name, own in zip(WAYS, ((), squares), strict=True):
        call("fit", options, *own)
        ensembles[name] = Run(options.config, [*options.overrides, *own]).ensemble()

    network = data.experiment.prepare.features
    kept = data.folder.root / "shapes"
    kept.mkdir(exist_ok=True)
    report = Report(
        "Aspect buckets against square crops",
        ["shape", "training images", "held out", "buckets", "squares", "ratio", "training images' own"],
    )
    found: dict[str, list[KernelDistance]] = {name: [] for name in (*WAYS, "floor")}
    shares = []
    for bucket in data.manifest.buckets:
        real, captions = images_of(data, bucket, HELD_OUT)
        train, _ = images_of(data, bucket, TRAIN)
        shares.append(len(real))
        sets = {"floor": train}
        for name, ensemble in ensembles.items():
            prompts = [captions[row * len(captions) // options.num] for row in range(options.num)]
            made = ensemble(prompts, seed=0, output_type="np", height=bucket.height, width=bucket.width, exact=True)
            drawn = made.images
            sets[name] = (255 * drawn).round().astype(np.uint8)

        features = features_of(real, network, kept)
        for name, images in sets.items():
            found[name].append(kernel_distance(features_of(images, network, kept), features))

        last = {name: [distances[-1]] for name, distances in found.items()}
        add_row(report, bucket.name, [len(train), len(real)], last)

    weights = torch.tensor(shares) / sum(shares)
    whole = {name: [averaged(distances, weights)] for name, distances in found.items()}
    num_train = sum(cluster.train for cluster in data.manifest.clusters)
    add_row(report, "all", [num_train, sum(shares)], whole)
    report.note(
        f"KID × 1000 ({network.name}), lower is better; {options.num} images of each shape; `all` weighs shapes by "
        "held-out images. The interval is over images alone: one training each."
    )
    report.finish(options.json)


def images_of(data: OpenRun, bucket: Bucket, side: str) -> tuple[UInt8[np.ndarray, "n h w 3"], list[str]]:
    """Images of a bucket and their captions."""
    names = [shard_name(k, side, bucket.name) for k in range(data.manifest.num_clusters)]
    shards = open_shards([Path(data.folder.shards) / name for name in names if name in data.manifest.index_sha256])
    rows = np.arange(len(shards))
    stored = StoredForm(data.manifest.stores, data.manifest.normalisation)
    x_0 = stored.mean(shards.take(rows, ["x_0"])["x_0"].float())
    return encoder_of(data).decode(x_0), shards.texts(rows, "caption")


def averaged(distances: Sequence[KernelDistance], weights: torch.Tensor) -> KernelDistance:
    """Weighted mean of the shapes' distances."""
    values = [distance.value for distance in distances]
    halves = torch.stack([distance.halves for distance in distances])
    return KernelDistance(float(weights.double() @ torch.tensor(values).double()), weights.double() @ halves.double())


def add_row(report: Report, shape: str, counts: Sequence[int], found: dict[str, list[KernelDistance]]) -> None:
    """Add one shape's row and figures."""
    over = ratio(found["buckets"], found["squares"])
    report.figures |= over.figures(f"buckets_over_squares_{shape}")
    cells = []
    for name in (*WAYS, "floor"):
        value = found[name][0].value
        report.figures[f"kid_{name}_{shape}"] = value
        cells.append(f"{1000 * value:.2f}")

    report.row(shape, *map("{:,}".format, counts), *cells[:2], str(over), cells[2])


if __name__ == "__main__":
    run(main)
