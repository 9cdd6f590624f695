"""Rows of several arrays, such as one memory map a part, as if they were one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Int, Shaped


class Rows:
    """Read-only rows of arrays that lie one behind the other; nothing is copied before it is asked for.

    Args:
        arrays: at least one; equal in dtype and in all but the first dimension. Memory maps stay on disk.
        kept: for each array the rows that count, ascending; None, for one or for all, keeps every row.
    """

    def __init__(
        self,
        arrays: Sequence[Shaped[np.ndarray, "n ..."]],
        kept: Sequence[Int[np.ndarray, "m"] | None] | None = None,
    ) -> None:
        if not arrays or len({(array.dtype, array.shape[1:]) for array in arrays}) != 1:
            raise ValueError("rows need at least one array, all of one dtype and row shape")
        self.arrays = list(arrays)
        self.kept = [None] * len(self.arrays) if kept is None else list(kept)
        sizes = [len(a if k is None else k) for a, k in zip(self.arrays, self.kept, strict=True)]
        self.starts = np.concatenate([[0], np.cumsum(sizes)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(self.arrays[0].shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.row_shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype:
        """Type of the numbers."""
        return self.arrays[0].dtype

    def take(self, rows: Int[np.ndarray, "m"]) -> Shaped[np.ndarray, "m ..."]:
        """A copy of the given rows, in the order given.

        Raises:
            IndexError: a row outside 0 to ``len(self)`` - 1.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(self)}")
        out = np.empty((len(rows), *self.row_shape), self.dtype)
        # By position, so that a disk is read forwards.
        order = rows.argsort(kind="stable")
        ends = np.searchsorted(rows[order], self.starts)
        for index, (first, last) in enumerate(pairwise(ends)):
            chosen = order[first:last]
            out[chosen] = self._pick(index, rows[chosen] - self.starts[index])
        return out

    def blocks(self, num_rows: int) -> Iterator[Shaped[np.ndarray, "m ..."]]:
        """All rows in order, at most ``num_rows`` at a time, never across two arrays."""
        for index, (first, last) in enumerate(pairwise(self.starts)):
            for start in range(0, int(last - first), num_rows):
                yield self._pick(index, slice(start, min(start + num_rows, int(last - first))))

    def _pick(self, index: int, which: Int[np.ndarray, "m"] | slice) -> Shaped[np.ndarray, "m ..."]:
        kept = self.kept[index]
        return self.arrays[index][which if kept is None else kept[which]]
