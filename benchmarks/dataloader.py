"""Loading speed, hot and cold, from a disk and from S3 on loopback: ours, StreamingDataset, WebDataset and LitData.

A sample is what Stable Diffusion's encoder stores: mean and standard deviation, 8 × 32 × 32 fp16 (16 KB). A timing is
one epoch of shuffled batches of 256, in a process of its own, with 0, 2 or 8 threads (ours) or workers (the others).
*Hot*: after an epoch of warming up. *Cold*: with the data set's own files dropped from the page cache; from S3, with an
empty cache on disk. Every other round visits the loaders in reverse order. A loader's speed is the median at its best
number.

    pip install litdata webdataset
    python benchmarks/dataloader.py --json benchmarks/results/dataloader.json
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
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import torch
from common import REPOSITORY, Report, parse, parser, progress, run
from dataloader_sides import BATCH_SIZE, SIDES, write_all

from ddm_lightning.core import registry

sys.path.append(str(REPOSITORY / "tests" / "shards"))
import servers  # type: ignore[import-not-found]  # of the tests

NUM_THREADS = (0, 2, 8)
KINDS = ("disk, hot", "disk, cold", "S3, cold")
# In all, and with ``--quick``.
NUM_SAMPLES = (192 * BATCH_SIZE, 12 * BATCH_SIZE)
NUM_ROUNDS = (5, 1)


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    registry.require("benchmarks/dataloader.py", "webdataset", "litdata")
    torch.set_num_threads(1)
    num_samples = NUM_SAMPLES[options.quick]
    num_rounds = NUM_ROUNDS[options.quick]
    keys: list[tuple[str, str, int]] = list(itertools.product(KINDS, SIDES, NUM_THREADS))
    speeds: dict[tuple[str, str, int], list[float]] = {key: [] for key in keys}
    with tempfile.TemporaryDirectory(prefix="dataloader-") as temporary, progress() as bars:
        folder = Path(temporary)
        task = bars.add_task("loaders", total=num_rounds * len(keys))
        write_all(folder / "data", num_samples)
        os.sync()  # or the page cache keeps what is to be dropped
        with servers.s3(folder / "data", folder, SimpleNamespace(setenv=os.environ.__setitem__)) as (url, _):
            for number in range(num_rounds):
                for key in keys[:: 1 if number % 2 == 0 else -1]:
                    speeds[key].append(num_samples / in_a_process(*key, folder, url, num_samples))
                    bars.advance(task)

    report = Report(
        f"Samples per second of {num_samples:,}: median (lowest to highest) of {num_rounds}",
        ["place", "loader", *(f"{number} threads or workers" for number in NUM_THREADS)],
    )
    add(report, speeds)
    report.finish(options.json)


def in_a_process(kind: str, side: str, number: int, folder: Path, url: str, num_samples: int) -> float:
    """Measure the seconds of one epoch in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(seconds, kind, side, number, folder, url, num_samples).result()


def seconds(kind: str, side: str, number: int, folder: Path, url: str, num_samples: int) -> float:
    """Measure the seconds of one epoch, which must hold every sample once."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the libraries' advice
    cache = folder / f"cache-{os.getpid()}"
    cache.mkdir()
    loader = SIDES[side](str(folder / "data") if kind.startswith("disk") else url, cache, number)
    if kind == "disk, hot":
        epoch(loader)
    if kind == "disk, cold":
        drop(folder / "data")

    start = time.perf_counter()
    ids = epoch(loader)
    passed = time.perf_counter() - start
    shutil.rmtree(cache)
    assert torch.equal(ids.sort().values, torch.arange(num_samples)), f"{side}: {kind}: not every sample once"
    return passed


def epoch(loader: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Read all batches; return the samples' ids."""
    return torch.cat([torch.as_tensor(batch["sample_id"]) for batch in loader])


def drop(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*.*"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def add(report: Report, speeds: dict[tuple[str, str, int], list[float]]) -> None:
    """Add rows and figures."""
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    for kind in KINDS:
        name = kind.replace(", ", "_").lower()
        best = {side: max(medians[kind, side, number] for number in NUM_THREADS) for side in SIDES}
        for side in SIDES:
            values = [speeds[kind, side, number] for number in NUM_THREADS]
            cells = []
            for one in values:
                cells.append(f"{statistics.median(one):,.0f} ({min(one):,.0f} to {max(one):,.0f})")

            report.row(kind, side, *cells)
            if side != "ours":
                report.figures[f"{name.removeprefix('disk_')}_over_{side}"] = best["ours"] / best[side]

        threaded = max(medians[kind, "ours", number] for number in NUM_THREADS[1:])
        report.figures[f"workers_over_none_{name}"] = threaded / medians[kind, "ours", 0]
        report.figures[f"{name}_samples_per_second"] = best["ours"]

    report.figures["workers_over_none"] = report.figures["workers_over_none_disk_hot"]


if __name__ == "__main__":
    run(main)
