"""A router that reads its shards through a cache of a tenth of them, against one that reads them from their folder.

Four clusters of samples of 404 bytes, 2 GB in some 500 shards. A linear router learns p(cluster | noisy sample, t) from
each batch of one epoch. Every batch and the final weights must be the same to the last bit.

    python benchmarks/small_cache.py --json benchmarks/results/small_cache.json
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from common import Report, parse, parser, progress, run
from rich.progress import Progress
from torch.nn.functional import cross_entropy

from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.shards.mosaic import open_writer

SEED, BATCH_SIZE, NUM_THREADS = 0, 16_384, 2
NUM_CLUSTERS, SIZE = 4, 192
COLUMNS = {"x_0": f"ndarray:float16:{SIZE},1,1", "sample_id": "int64", "cluster": "int32", "label": "int32"}
SHARD_BYTES, CACHE_BYTES, NUM_SAMPLES = 1 << 22, 200e6, 5_000_000


class Ended(NamedTuple):
    """What one reader saw and learned."""

    batches: str
    """SHA-256 of all batches."""
    weights: str
    """SHA-256 of the router's weights."""
    loss: float
    """Of the last batch."""
    held_bytes: int
    """Most that the cache held after a batch."""
    seconds: float


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    num_samples = NUM_SAMPLES * 3 // 20 if options.quick else NUM_SAMPLES
    with tempfile.TemporaryDirectory(prefix="small-cache-") as temporary, progress() as bars:
        folder = Path(temporary)
        write_all(folder / "shards", num_samples, bars)
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*.mds"))
        whole = train(str(folder / "shards"), folder / "whole", None, num_samples, bars)
        cached = train(f"file://{folder}/shards", folder / "cached", CACHE_BYTES, num_samples, bars)
    report = Report(
        f"{num_samples:,} samples, {num_bytes / 1e9:.2f} GB of shards, read once each way",
        ["shards", "SHA-256 of all batches", "SHA-256 of the weights", "last loss", "most in the cache, MB", "seconds"],
    )
    for name, one in (("in their folder", whole), (f"through {CACHE_BYTES / 1e6:.0f} MB", cached)):
        held = f"{one.held_bytes / 1e6:.0f}"
        report.row(name, one.batches[:16], one.weights[:16], f"{one.loss:.4f}", held, f"{one.seconds:.0f}")
    report.figures = {
        "same_batches": float(whole.batches == cached.batches),
        "same_weights": float(whole.weights == cached.weights),
        "shard_gb": num_bytes / 1e9,
        "peak_cache_mb": cached.held_bytes / 1e6,
        "seconds_over_whole": cached.seconds / whole.seconds,
    }
    report.finish(options.json)


def write_all(folder: Path, num_samples: int, bars: Progress) -> None:
    """Write the clusters, each around a mean of its own."""
    rng = np.random.default_rng(SEED)
    task = bars.add_task("writing", total=num_samples)
    for cluster in range(NUM_CLUSTERS):
        mean = rng.normal(size=(SIZE, 1, 1)) / 4
        with open_writer(folder / f"cluster-{cluster}/train", COLUMNS, None, SHARD_BYTES) as shards:
            for first in range(cluster, num_samples, NUM_CLUSTERS * 1000):
                ids = range(first, min(first + NUM_CLUSTERS * 1000, num_samples), NUM_CLUSTERS)
                x_0 = (mean + rng.standard_normal((len(ids), SIZE, 1, 1), np.float32)).astype(np.float16)
                for row, sample_id in zip(x_0, ids, strict=True):
                    shards.write({"x_0": row, "sample_id": sample_id, "cluster": cluster, "label": cluster})
                bars.advance(task, len(ids))


def train(place: str, cache: Path, max_cache_bytes: float | None, num_samples: int, bars: Progress) -> Ended:
    """Take one epoch's steps."""
    start = time.perf_counter()
    data = ClusterDataModule(
        place,
        range(NUM_CLUSTERS),
        BATCH_SIZE,
        SEED,
        cache,
        num_workers=NUM_THREADS,
        max_cache_bytes=max_cache_bytes,
    )
    data.prepare_data()
    router = torch.nn.Linear(SIZE + 1, NUM_CLUSTERS)
    torch.nn.init.zeros_(router.weight)
    torch.nn.init.zeros_(router.bias)
    optimizer = torch.optim.AdamW(router.parameters(), lr=1e-3)
    seen, held, loss = hashlib.sha256(), 0, torch.tensor(0.0)
    for step, batch in enumerate(bars.track(data.train_dataloader(), num_samples // BATCH_SIZE, description="steps")):
        for name in sorted(batch):
            seen.update(batch[name].contiguous().numpy().tobytes())
        generator = keyed_generator(SEED, step)
        t = torch.rand(len(batch["x_0"]), generator=generator)
        x_0 = batch["x_0"].float()
        x_t = interpolate(x_0, torch.randn(x_0.shape, generator=generator), t)
        loss = cross_entropy(router(torch.cat([x_t.flatten(1), t[:, None]], 1)), batch["cluster"].long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        held = max(held, sum(path.stat().st_size for path in cache.rglob("*.mds*")))
    weights = hashlib.sha256(b"".join(value.numpy().tobytes() for value in router.state_dict().values()))
    return Ended(seen.hexdigest(), weights.hexdigest(), float(loss.detach()), held, time.perf_counter() - start)


if __name__ == "__main__":
    run(main)
