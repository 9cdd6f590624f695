"""Rows of several arrays, such as one memory map a part, as if they were one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int, Shaped


class Rows:
    """Read-only rows of arrays that lie one behind the other; nothing is copied before it is asked for.

    Args:
        arrays: at least one; equal in dtype and in all but the first dimension. Memory maps stay on disk.
    """

    def __init__(self, arrays: Sequence[Shaped[np.ndarray, "n ..."]]) -> None:
        if not arrays or len({(array.dtype, array.shape[1:]) for array in arrays}) != 1:
            raise ValueError("rows need at least one array, all of one dtype and row shape")
        self.arrays = list(arrays)
        self.starts = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return tuple(self.arrays[0].shape[1:])

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
        for array, start, first, last in zip(self.arrays, self.starts, ends, ends[1:], strict=False):
            chosen = order[first:last]
            out[chosen] = array[rows[chosen] - start]
        return out

    def blocks(self, num_rows: int) -> Iterator[Shaped[np.ndarray, "m ..."]]:
        """All rows in order, at most ``num_rows`` at a time, never across two arrays."""
        for array in self.arrays:
            for start in range(0, len(array), num_rows):
                yield array[start : start + num_rows]
