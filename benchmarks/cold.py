"""Cold loading from S3 on loopback, beside a client that gets the same shards by as many requests at once.

The plain client only reads them; another keeps them and takes their SHA-1. Neither makes batches. Each turn has a
process of its own; the server shares the cores. In memory, because a virtual machine may get the pages of new files
from its host, slowly.

    TMPDIR=/dev/shm python benchmarks/cold.py --json benchmarks/results/cold.json
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import boto3
import torch
from common import Report, parse, parser, run, store
from dataloader import BATCH_SIZE, NUM_SAMPLES, epoch, write
from step_clock import HEADINGS, Seconds, add_ratio, timed

import ddm_lightning.core.filesystems  # noqa: F401  # before the clock starts
from ddm_lightning.shards.datamodule import ClusterDataModule

_ROUNDS = (4, 1)
_PART = "cluster-0/train"


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    torch.set_num_threads(1)
    num_samples = NUM_SAMPLES[options.quick] // 2
    found: dict[str, list[Seconds]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory(prefix="cold-") as temporary:
        folder = Path(temporary)
        write(folder / "store" / _PART, num_samples)
        with store(folder):
            order = [*SIDES]
            for _ in range(_ROUNDS[options.quick]):
                for name in order:
                    work = partial(SIDES[name], folder)
                    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                        turn = pool.submit(timed, work, torch.device("cpu"))
                        found[name].append(turn.result())

                order.reverse()

    # Speeds of one to the other are times of the other to the one.
    report = Report(f"Cold loading of {num_samples:,} samples: client (ours), and our loader (other)", HEADINGS)
    for name in ("plain_client", "keeping_client"):
        add_ratio(report, f"cold_over_{name}", name.replace("_", " "), found[name], found["ours"])

    report.finish(options.json)


def _ours(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        data = ClusterDataModule("s3://images/run", [0], BATCH_SIZE, 0, Path(cache), num_workers=2)
        data.prepare_data()
        epoch(data.train_dataloader())


def _client(folder: Path, take: Callable[[str, Iterable[bytes]], object]) -> None:
    client = boto3.Session().client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])

    def get(path: Path) -> None:
        body = client.get_object(Bucket="images", Key=f"run/{_PART}/{path.name}")["Body"]
        take(path.name, body.iter_chunks(1 << 18))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(get, (folder / "store" / _PART).glob("*.mds")))


def _plain_client(folder: Path) -> None:
    _client(folder, lambda _, blocks: sum(map(len, blocks)))


def _keeping_client(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as cache:

        def keep(name: str, blocks: Iterable[bytes]) -> None:
            digest = hashlib.sha1(usedforsecurity=False)
            with Path(cache, name).open("wb") as file:
                for block in blocks:
                    digest.update(block)
                    file.write(block)

        _client(folder, keep)


SIDES: dict[str, Callable[[Path], None]] = {
    "ours": _ours,
    "plain_client": _plain_client,
    "keeping_client": _keeping_client,
}


if __name__ == "__main__":
    run(main)
