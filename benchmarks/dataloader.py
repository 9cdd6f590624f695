"""Loading speed of nine shapes over that of one, from a disk whose files are in memory.

A sample is what Stable Diffusion's encoder stores: mean and standard deviation, 8 × 32 × 32 fp16 (16 KB). Those of the
nine shapes have as many bytes together. A timing is an epoch of shuffled batches of 256, with 0, 2 or 8 threads; the
sides alternate in one process.

    python benchmarks/dataloader.py --json benchmarks/results/dataloader_shapes.json
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import GRIDS, Report, parse, parser, run
from step_clock import HEADINGS, add_ratio, grouped, in_turn

from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.files import sha256_file
from ddm_lightning.shards.datamodule import ClusterDataModule, ShardLoader
from ddm_lightning.shards.manifest import TRAIN, columns_in, shard_name
from ddm_lightning.shards.mosaic import open_writer

BATCH_SIZE = 256
NUM_THREADS = (0, 2, 8)
# In all, and with ``--quick``.
NUM_SAMPLES = (192 * BATCH_SIZE, 12 * BATCH_SIZE)
NUM_ROUNDS = (30, 6)
_SHARD_BYTES = 1 << 26
_COLUMNS = {"x_0": "ndarray:float16:8,32,32", "sample_id": "int64", "cluster": "int32", "label": "int32"}
_SQUARE = Bucket(256, 256, (8, 32, 32))


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    torch.set_num_threads(1)
    report = compare_shapes(NUM_SAMPLES[options.quick], NUM_ROUNDS[options.quick])
    report.finish(options.json)


def compare_shapes(num_samples: int, num_rounds: int) -> Report:
    """Measure epochs of as many samples of nine shapes, some of which are carried over, and of one shape."""
    report = Report("Loading a batch of 256 of nine shapes (ours) or of one (other)", HEADINGS)
    num = num_samples // len(GRIDS)
    buckets = [Bucket(32 * rows, 32 * columns, (8, 4 * rows, 4 * columns)) for rows, columns in GRIDS]
    hashes = {}
    with tempfile.TemporaryDirectory(prefix="dataloader-") as temporary:
        folder = Path(temporary)
        write(folder / "cluster-0/train", num * len(GRIDS))
        for bucket in buckets:
            name = shard_name(0, TRAIN, bucket.name)
            write(folder / name, num, bucket)
            hashes[name] = sha256_file(folder / name / "index.json")

        for number in NUM_THREADS:
            mixed = loader_of(folder, number, buckets=buckets, index_sha256=hashes)
            square = loader_of(folder, number)
            ways = {"shapes": partial(epoch, mixed), "one": partial(epoch, square)}
            found = in_turn(ways, torch.device("cpu"), num_rounds)
            means = [grouped(turns, 1, len(mixed)) for turns in found.values()]
            add_ratio(report, f"shapes_over_one_{number}_threads", f"{number} threads", *means)

    return report


def write(folder: Path, num_samples: int, bucket: Bucket = _SQUARE) -> None:
    """Write ``num_samples`` samples of one shape as ``prepare`` does."""
    rng = np.random.default_rng(0)
    with open_writer(folder, columns_in(_COLUMNS, bucket), None, _SHARD_BYTES) as shards:
        for number in range(num_samples):
            x_0 = rng.integers(0, 1 << 14, bucket.x_shape, np.int16).view(np.float16)
            shards.write({"x_0": x_0, "sample_id": number, "cluster": 0, "label": number % 1000})


def loader_of(folder: Path, num_threads: int, **shapes: Any) -> ShardLoader:
    """Build our loader of the shards in ``folder``."""
    data = ClusterDataModule(str(folder), [0], BATCH_SIZE, 0, folder, num_workers=num_threads, **shapes)
    data.prepare_data()
    return data.train_dataloader()


def epoch(loader: Iterable[Mapping[str, Any]]) -> None:
    """Read all batches."""
    for _ in loader:
        pass


if __name__ == "__main__":
    run(main)
