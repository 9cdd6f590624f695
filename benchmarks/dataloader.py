"""Loading speed, hot and cold: ours, and that of StreamingDataset, whose format it reads.

A sample is what Stable Diffusion's encoder stores: mean and standard deviation, 8 × 32 × 32 fp16 (16 KB). A timing is
one epoch of shuffled batches of 256, in a process of its own, with 0, 2 or 8 threads (ours) or workers (Streaming's).
*Hot*: from a disk, after an epoch of warming up. *Cold*: from S3 on loopback, with an empty cache on disk. Every other
round visits the loaders in reverse order. A loader's speed is the median at its best number.

``--shapes`` compares our loading of nine shapes with that of one instead, hot, the sides alternating in one process.

    python benchmarks/dataloader.py --json benchmarks/results/dataloader_streaming.json
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import GRIDS, Report, parse, parser, progress, run, store
from step import HEADINGS, add_ratio
from step_clock import grouped, in_turn
from torch.utils.data import DataLoader

from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.files import sha256_file
from ddm_lightning.shards.datamodule import ClusterDataModule, ShardLoader
from ddm_lightning.shards.manifest import TRAIN, columns_in, shard_name
from ddm_lightning.shards.mosaic import open_writer

BATCH_SIZE = 256
NUM_THREADS = (0, 2, 8)
KINDS = ("hot", "cold")
# In all, and with ``--quick``.
NUM_SAMPLES = (192 * BATCH_SIZE, 12 * BATCH_SIZE)
NUM_ROUNDS = (5, 1)
_SHARD_BYTES = 1 << 26
_COLUMNS = {"x_0": "ndarray:float16:8,32,32", "sample_id": "int64", "cluster": "int32", "label": "int32"}
_SQUARE = Bucket(256, 256, (8, 32, 32))
Key = tuple[str, str, int]
"""Kind, loader, and number of threads or workers."""


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", fixed=True)
    cli.add_argument("--shapes", action="store_true", help="compare nine shapes with one, and no other loaders")
    options = parse(cli, arguments)
    torch.set_num_threads(1)
    num_samples = NUM_SAMPLES[options.quick]
    num_rounds = NUM_ROUNDS[options.quick]
    if options.shapes:
        compare_shapes(num_samples, 6 * num_rounds).finish(options.json)
        return

    keys: list[Key] = list(itertools.product(KINDS, SIDES, NUM_THREADS))
    speeds: dict[Key, list[float]] = {key: [] for key in keys}
    with tempfile.TemporaryDirectory(prefix="dataloader-") as temporary, progress() as bars:
        folder = Path(temporary)
        task = bars.add_task("loaders", total=num_rounds * len(keys))
        write(folder / "store/cluster-0/train", num_samples)
        with store(folder) as (url, _):
            for _ in range(num_rounds):
                for key in keys:
                    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                        took = pool.submit(seconds, key, folder, url, num_samples).result()

                    speeds[key].append(num_samples / took)
                    bars.advance(task)

                keys.reverse()

    headings = ["", "loader", *map("{} threads or workers".format, NUM_THREADS)]
    report = Report(f"Samples per second of {num_samples:,}: median (lowest to highest) of {num_rounds}", headings)
    add(report, speeds)
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
            mixed, square = (
                _ours(temporary, folder, number, buckets=shapes, index_sha256=hashes) for shapes in (buckets, ())
            )
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


def seconds(key: Key, folder: Path, url: str, num_samples: int) -> float:
    """Measure the seconds of one epoch, which must hold every sample once."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the libraries' advice
    kind, side, number = key
    cache = folder / f"cache-{os.getpid()}"
    cache.mkdir()
    place = url if kind == "cold" else str(folder / "store")
    loader = SIDES[side](place, cache, number)
    if kind == "hot":
        epoch(loader)

    start = time.perf_counter()
    ids = epoch(loader)
    passed = time.perf_counter() - start
    shutil.rmtree(cache)
    assert torch.equal(ids.sort().values, torch.arange(num_samples)), f"{side}: {kind}: not every sample once"
    return passed


def _ours(place: str, cache: Path, num_threads: int, **shapes: Any) -> ShardLoader:
    data = ClusterDataModule(place, [0], BATCH_SIZE, 0, cache, num_workers=num_threads, **shapes)
    data.prepare_data()
    return data.train_dataloader()


def _streaming(place: str, cache: Path, num_workers: int) -> Iterable[Any]:
    from streaming import StreamingDataset

    folder = f"{place}/cluster-0/train"
    where: dict[str, Any] = {"local": folder}
    if "://" in place:
        where = {"remote": folder, "local": str(cache)}

    dataset = StreamingDataset(**where, shuffle=True, batch_size=BATCH_SIZE, num_canonical_nodes=1)
    return DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, persistent_workers=num_workers > 0)


SIDES: dict[str, Callable[[str, Path, int], Iterable[Any]]] = {"ours": _ours, "streaming": _streaming}
"""Build a loader of the data in a folder or at a URL, with a folder for a cache and a number of threads or workers."""


def epoch(loader: Iterable[Mapping[str, Any]]) -> torch.Tensor:
    """Read all batches; return the samples' ids."""
    return torch.cat([torch.as_tensor(batch["sample_id"]) for batch in loader])


def add(report: Report, speeds: Mapping[Key, Sequence[float]]) -> None:
    """Add rows and figures."""
    for kind in KINDS:
        best = {}
        for side in SIDES:
            medians = []
            cells = []
            for number in NUM_THREADS:
                found = speeds[kind, side, number]
                medians.append(statistics.median(found))
                cells.append(f"{medians[-1]:,.0f} ({min(found):,.0f} to {max(found):,.0f})")

            report.row(kind, side, *cells)
            best[side] = max(medians)
            if side == "ours":
                report.figures[f"workers_over_none_{kind}"] = max(medians[1:]) / medians[0]

        report.figures[f"{kind}_over_streaming"] = best["ours"] / best["streaming"]
        report.figures[f"{kind}_samples_per_second"] = best["ours"]


if __name__ == "__main__":
    run(main)
