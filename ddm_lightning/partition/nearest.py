"""Features block by block, and the nearest of many centroids, decided the same way on every machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int32, Int64, Shaped
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.processes import num_cores
from ddm_lightning.partition.rows import Rows

# Entries of one matrix of rows times centroids: 32 MB in float32, whatever the number of centroids.
_SCORES_AT_ONCE = 1 << 23
_MOST_ROWS, _LEAST_ROWS = 8192, 256
T = TypeVar("T")

# Rows that are read at a time where nothing else decides.
ROWS_AT_ONCE = 4096
# Scattered rows, slow to read in every pass, are kept in memory up to this size.
_KEPT_BYTES = 1 << 30

Tick = Callable[[int, int], None]
"""Called with rows read and rows to read."""


def no_tick(done: int, total: int) -> None:
    """Tells nobody."""


def rows_at_once(num_centroids: int) -> int:
    """Rows that are compared with so many centroids at a time."""
    return max(_LEAST_ROWS, min(_MOST_ROWS, _SCORES_AT_ONCE // max(1, num_centroids)))


def prepared(features: Shaped[np.ndarray, "n d"], metric: str, device: str = "cpu") -> Float[Tensor, "n d"]:
    """Features as they are compared: float32 on the device; rows of unit length where the metric is spherical."""
    # A copy, because torch does not like memory that it may not write to.
    x = torch.from_numpy(np.array(features, dtype=np.float32)).to(device)
    return torch.nn.functional.normalize(x, dim=1) if metric == "spherical" else x


class FeatureBlocks:
    """Some or all rows of features as float32, in blocks that do not depend on how the rows are split into arrays.

    What a process holds is bounded: rows that are scattered are read once and kept up to 1 GiB, others in each pass.

    Args:
        rows: features, float16 or float32.
        metric: ``spherical`` or ``euclidean``.
        num_rows: rows of a block.
        device: torch device on which the blocks come.
        chosen: ascending numbers of the rows to take; None takes all.
    """

    def __init__(
        self, rows: Rows, metric: str, num_rows: int, device: str = "cpu", chosen: Int64[np.ndarray, "m"] | None = None
    ) -> None:
        self.rows, self.metric, self.num_rows, self.device, self.chosen = rows, metric, num_rows, device, chosen
        self._kept: np.ndarray | None = None
        if chosen is not None and len(self) * rows.row_shape[0] * rows.dtype.itemsize <= _KEPT_BYTES:
            self._kept = rows.take(chosen)

    def __len__(self) -> int:
        return len(self.rows) if self.chosen is None else len(self.chosen)

    @property
    def starts(self) -> range:
        """Where the blocks begin."""
        return range(0, len(self), self.num_rows)

    def read(self, start: int, buffer: Float[np.ndarray, "r d"]) -> Float[Tensor, "m d"]:
        """The block that begins at ``start``, as it is stored; on the CPU it lies in ``buffer``."""
        block = buffer[: min(self.num_rows, len(self) - start)]
        self._read_into(block, start)
        return torch.from_numpy(block).to(self.device)

    def sample(self, size: int, generator: torch.Generator) -> Float[Tensor, "m d"]:
        """At most ``size`` different rows, drawn by the generator, in the order drawn.

        Raises:
            UserError: one is not finite.
        """
        drawn = torch.randperm(len(self), generator=generator)[:size].numpy()
        numbers = drawn if self.chosen is None else self.chosen[drawn]
        x = prepared(self.rows.take(numbers), self.metric, self.device)
        fine = torch.isfinite(x).all(1)
        if not bool(fine.all()):
            raise not_finite(int(numbers[int((~fine).nonzero()[0])]))
        return x

    def number(self, position: int) -> int:
        """Which of all rows the row at this position is."""
        return position if self.chosen is None else int(self.chosen[position])

    def _read_into(self, out: Float[np.ndarray, "m d"], start: int) -> None:
        stop = start + len(out)
        if self._kept is not None:
            out[:] = self._kept[start:stop]
        elif self.chosen is None:
            self.rows.read_into(out, start)
        else:
            out[:] = self.rows.take(self.chosen[start:stop])


@contextmanager
def one_thread() -> Iterator[None]:
    """Small operations do not wait for a second thread, and their results do not hang on how many there are."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def in_order(work: Callable[[int], T], items: Iterable[int], device: str) -> Iterator[T]:
    """``work`` of each item, in order, by a thread a core, each of which computes alone.

    Threads that share one operation wait for each other at each; with others on the machine they mostly wait. And
    what one thread computes does not hang on how many there are.
    """
    if device != "cpu":
        yield from map(work, items)
        return
    num_threads = torch.get_num_threads()
    num_workers = num_cores()
    ready: deque[Future[T]] = deque()
    try:
        with ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for item in items:
                ready.append(pool.submit(work, item))
                if len(ready) > 2 * num_workers:  # what is done and not yet used is bounded
                    yield ready.popleft().result()
            while ready:
                yield ready.popleft().result()
    finally:
        torch.set_num_threads(num_threads)


def not_finite(row: int | str) -> UserError:
    """The refusal of features that hold NaN or infinity."""
    return UserError(
        f"features of sample {row}: values that are not finite, or too large for float32; "
        "check the weights of prepare.features"
    )


def nearest(
    features: Shaped[np.ndarray, "n d"],
    centroids: Float[Tensor, "k d"],
    metric: str,
    device: str = "cpu",
    name_of: Callable[[int], int | str] = int,
) -> Int64[Tensor, "n"]:
    """The nearest centroid of each row by Euclidean distance, the first of those equally near.

    A float32 product decides wherever its rounding cannot matter; the rest, a row in some hundreds, is done
    again in float64. So the answer does not hang on block, threads, processor or device.

    Raises:
        UserError: features that are not finite; the line has the row's ``name_of``.
    """
    # Centred, because |x|² + |c|² - 2xc loses digits when the mean is large against the spread.
    centre = centroids.double().mean(0)
    near = (centroids.double() - centre).float().to(device)
    half = near.double().square().sum(1).div(2).float()
    # Twice the bound of a dot product's rounding (Higham 2002, eq. 3.5), with room for the subtractions'.
    tolerance = 2 * (centroids.shape[1] + 16) * 2.0**-24 * float((2 * half.max()).sqrt())
    reach = float((2 * half.max()).sqrt() + centre.norm())
    found = [torch.empty(0, dtype=torch.int64)]
    step = rows_at_once(len(centroids)) // 2
    for start in range(0, len(features), step):
        block = features[start : start + step]
        x = prepared(block, metric, device).sub_(centre.float().to(device))
        scores = torch.addmm(half, x, near.T, alpha=-1)
        least, index = scores.min(1)
        if not bool(torch.isfinite(least).all()):
            raise not_finite(name_of(start + int((~torch.isfinite(least)).nonzero()[0])))
        second = scores.scatter_(1, index.unsqueeze(1), torch.inf).amin(1)
        doubtful = (second - least <= tolerance * (x.norm(dim=1) + reach)).cpu()
        index = index.cpu()
        if bool(doubtful.any()):
            index[doubtful] = _nearest_in_float64(block[doubtful.numpy()], centroids, metric)
        found.append(index)
    return torch.cat(found)


def nearest_of_rows(
    rows: Rows, centroids: Float[Tensor, "k d"], metric: str, device: str = "cpu", tick: Tick = no_tick
) -> Int32[np.ndarray, "n"]:
    """``nearest`` of features that may be larger than memory, by one pass.

    Raises:
        UserError: features that are not finite.
    """
    found = np.empty(len(rows), np.int32)
    starts = range(0, len(rows), ROWS_AT_ONCE)

    def of_block(start: int) -> Int64[Tensor, "m"]:
        block = rows[start : start + ROWS_AT_ONCE]
        return nearest(block, centroids, metric, device, name_of=lambda row: start + row)

    for start, block in zip(starts, in_order(of_block, starts, device), strict=True):
        found[start : start + len(block)] = block.numpy()
        tick(start + len(block), len(rows))
    return found


def _nearest_in_float64(
    features: Shaped[np.ndarray, "n d"], centroids: Float[Tensor, "k d"], metric: str
) -> Int64[Tensor, "n"]:
    x = torch.from_numpy(np.array(features, dtype=np.float64))
    x = torch.nn.functional.normalize(x, dim=1) if metric == "spherical" else x
    centre = centroids.double().mean(0)
    x, near = x - centre, centroids.double() - centre
    half = near.square().sum(1) / 2
    scores = torch.addmm(half, x, near.T, alpha=-1)
    size = x.norm(dim=1, keepdim=True) + (2 * half.max()).sqrt() + centre.norm()
    # What float64 cannot tell apart either is as near as the nearest.
    ties = scores <= scores.min(1, keepdim=True).values + 2.0**-44 * size.square()
    return ties.int().argmax(1)
