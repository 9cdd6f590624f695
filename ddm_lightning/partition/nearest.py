"""The nearest of many centroids, decided the same way on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Int32, Shaped

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.processes import num_cores
from ddm_lightning.partition.columns import Rows
from ddm_lightning.partition.kmeans import Assignment, Centroids, PerCluster, Points

# Entries of one matrix of rows times centroids: 32 MB in float32.
_SCORES_AT_ONCE = 1 << 23
_MOST_ROWS = 8192
_LEAST_ROWS = 256
T = TypeVar("T")

# Rows read at a time by ``nearest_of_rows``.
ROWS_AT_ONCE = 4096

OnProgress = Callable[[int, int], None]
"""Progress: called with the rows read so far and all rows to read."""


def rows_at_once(num_centroids: int) -> int:
    """Return the number of rows to compare at a time with ``num_centroids`` centroids."""
    return max(_LEAST_ROWS, min(_MOST_ROWS, _SCORES_AT_ONCE // num_centroids))


def prepared(
    features: Shaped[np.ndarray, "n d"], metric: str, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Points:
    """Copy features to the device; normalise their rows if the metric is spherical."""
    # A copy, because torch warns about read-only memory.
    x = torch.from_numpy(features.copy()).to(device, dtype)
    if metric == "spherical":
        return torch.nn.functional.normalize(x, dim=1)

    return x


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one torch thread: fast for small operations, and the same result on any number of cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def in_order(work: Callable[[int], T], items: Sequence[int], device: str) -> Iterator[T]:
    """Yield ``work`` of each item, in order, computed by one single-threaded worker per core.

    Threads that share one operation wait for each other. With one thread per operation, they do not, and results do
    not depend on the number of threads.
    """
    if device != "cpu":
        yield from map(work, items)
        return

    num_workers = num_cores()
    at_once = 4 * num_workers  # bounds finished, unused results
    with one_thread(), ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for start in range(0, len(items), at_once):
            yield from pool.map(work, items[start : start + at_once])


def nearest(
    features: Shaped[np.ndarray, "n d"],
    centroids: Centroids,
    metric: str,
    device: str = "cpu",
    prices: PerCluster | float = 0.0,
) -> Assignment:
    """Return the nearest centroid of each row by Euclidean distance; of equally near ones, the first.

    Distances are float64, and centroids that float64 cannot tell apart count as equally near. So the answer does not
    depend on blocks, threads, processor or device.

    Args:
        features: any float type.
        centroids: float32 or float64, on the CPU.
        metric: ``spherical`` normalises the rows; ``euclidean`` takes them as they are.
        device: torch device that computes.
        prices: added to the squared distances from each centroid, at least 0.

    Raises:
        UserError: features are not finite.
    """
    # Centred, because |x|² + |c|² - 2xc loses digits when the mean is large against the spread.
    centre = centroids.double().mean(0)
    near = centroids.double() - centre
    half = (near.square().sum(1) + prices) / 2
    reach = float((2 * half.max()).sqrt() + centre.norm())
    centre, near, half = (values.to(device) for values in (centre, near, half))
    found = [torch.empty(0, dtype=torch.int64)]
    step = rows_at_once(len(centroids)) // 2
    for start in range(0, len(features), step):
        x = prepared(features[start : start + step], metric, device, torch.float64) - centre
        scores = torch.addmm(half, x, near.T, alpha=-1)
        least = scores.amin(1, keepdim=True)
        if not bool(torch.isfinite(least).all()):
            raise UserError("features are not finite; check the weights of prepare.features")

        ties = scores <= least + 2.0**-44 * (x.norm(dim=1, keepdim=True) + reach).square()
        found.append(ties.view(torch.uint8).argmax(1).cpu())

    return torch.cat(found)


def nearest_of_rows(
    rows: Rows,
    centroids: Centroids,
    metric: str,
    device: str = "cpu",
    on_progress: OnProgress = lambda *_: None,
    prices: PerCluster | float = 0.0,
) -> Int32[np.ndarray, "n"]:
    """Apply ``nearest`` to features that may be larger than memory, in one pass.

    Raises:
        UserError: features are not finite.
    """
    found = np.empty(len(rows), np.int32)
    starts = range(0, len(rows), ROWS_AT_ONCE)

    blocks = in_order(
        lambda start: nearest(rows[start : start + ROWS_AT_ONCE], centroids, metric, device, prices), starts, device
    )
    for start, block in zip(starts, blocks, strict=True):
        found[start : start + len(block)] = block.numpy()
        on_progress(start + len(block), len(rows))

    return found
