"""One library of ``partition.py``, in a process of its own to measure its memory; prints one line of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddm_lightning.config.experiment import PartitionConfig
from ddm_lightning.core.columns import Rows, StoredArray
from ddm_lightning.partition.build import fit_fine, fit_partition, group_fine
from ddm_lightning.partition.nearest import nearest_of_rows

_ROWS_AT_ONCE = 4096


def ours(data: Path, out: Path, seed: int, settings: dict[str, Any]) -> dict[str, float]:
    """Time the fine stage, then the rest of the partition."""
    rows = Rows([StoredArray.of(data)])
    config = _config(settings)
    generator = torch.Generator().manual_seed(seed)
    _use_cores(settings["num_threads"])
    clock = Clock()
    fine = fit_fine(rows, config, generator)
    found = clock.read()
    np.save(out, fine.numpy())
    rest = Clock()
    nearest_fine = nearest_of_rows(rows, fine, config.metric)
    per_fine = torch.from_numpy(np.bincount(nearest_fine, minlength=len(fine)))
    rule = group_fine(fine, per_fine, config, generator)
    found["rest_seconds"] = rest.read()["seconds"]
    counts = np.bincount(rule.cluster_of_fine.numpy(), per_fine.numpy(), minlength=config.num_clusters)
    return {**found, "largest_over_mean": float(counts.max() / counts.mean())}


def faiss(data: Path, out: Path, seed: int, settings: dict[str, Any]) -> dict[str, float]:
    """Time k-means on all samples, which faiss needs in memory."""
    import faiss as library

    x = np.load(data)
    library.omp_set_num_threads(settings["num_threads"])
    fitted = library.Kmeans(
        x.shape[1], settings["num_fine"], niter=settings["iterations"], seed=seed, max_points_per_centroid=len(x)
    )
    clock = Clock()
    fitted.train(x)
    found = clock.read()
    np.save(out, np.asarray(fitted.centroids))
    return found


def sklearn(data: Path, out: Path, seed: int, settings: dict[str, Any]) -> dict[str, float]:
    """Time k-means on mini-batches, with as many passes over the samples as the others have iterations."""
    from sklearn.cluster import MiniBatchKMeans

    x = np.load(data)
    fitted = MiniBatchKMeans(
        settings["num_fine"],
        init="random",
        n_init=1,
        max_iter=settings["iterations"],
        max_no_improvement=None,
        batch_size=8192,
        random_state=seed,
        compute_labels=False,
    )
    clock = Clock()
    fitted.fit(x)
    found = clock.read()
    np.save(out, fitted.cluster_centers_)
    return found


def inertia(data: Path, out: Path, _seed: int, _settings: dict[str, Any]) -> dict[str, float]:
    """Measure the mean squared distance to the nearest centroid in ``out``, with NumPy."""
    centroids = np.load(out).astype(np.float32)
    x = np.load(data, mmap_mode="r")
    squares, doubled = np.square(centroids).sum(1), np.ascontiguousarray(-2 * centroids.T)
    total = 0.0
    for start in range(0, len(x), _ROWS_AT_ONCE):
        block = np.asarray(x[start : start + _ROWS_AT_ONCE])
        scores = block @ doubled
        scores += squares
        total += float(scores.min(1).sum(dtype=np.float64) + np.square(block).sum(dtype=np.float64))
    return {"inertia": total / len(x)}


def memory(data: Path, _out: Path, seed: int, settings: dict[str, Any]) -> dict[str, float]:
    """Partition features split into ten arrays, and assign all samples."""
    x = StoredArray.of(data)
    ends = np.linspace(0, len(x), 11).astype(int).tolist()
    row_bytes = x.nbytes // len(x)
    rows = Rows(
        [
            replace(x, shape=(stop - start, *x.shape[1:]), offset=x.offset + start * row_bytes)
            for start, stop in pairwise(ends)
        ]
    )
    _use_cores(settings["num_threads"])
    labels, keys = np.zeros(len(x), np.int64), [""] * len(x)
    clock = Clock()
    partition, clusters = fit_partition(rows, _config(settings), seed, labels=labels, keys=keys)
    assert np.array_equal(np.bincount(clusters), partition.counts.numpy())
    return clock.read()


class Clock:
    """Wall-clock and CPU seconds since its creation."""

    def __init__(self) -> None:
        self.start = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        """Read both."""
        return {"seconds": time.perf_counter() - self.start[0], "cpu_seconds": time.process_time() - self.start[1]}


def peak_gb() -> float:
    """Peak resident memory of this process in 10^9 bytes, mapped files included."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e9


def _use_cores(num: int) -> None:
    """Restrict this process to ``num`` cores; our k-means runs one thread on each."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:num])
    torch.set_num_threads(num)


def _config(settings: dict[str, Any]) -> PartitionConfig:
    return PartitionConfig(
        num_clusters=settings["num_clusters"],
        num_fine_centroids=settings["num_fine"],
        num_iterations=settings["iterations"],
    )


if __name__ == "__main__":
    SIDES = {side.__name__: side for side in (ours, faiss, sklearn, inertia, memory)}
    NAME, DATA, OUT, SEED, SETTINGS = sys.argv[1:]
    RESULT = SIDES[NAME](Path(DATA), Path(OUT), int(SEED), json.loads(SETTINGS))
    print(json.dumps({**RESULT, "peak_gb": peak_gb()}))
