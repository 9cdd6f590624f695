"""Several arrays, such as one file per part, read as one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Shaped

from ddm_lightning.core.columns import StoredArray, Strings

_ROWS_AT_ONCE = 4096


class Rows(Sequence[Any]):
    """Read-only rows of concatenated arrays, read and copied lazily.

    Args:
        arrays: at least one; equal in dtype and in all dimensions but the first.
        kept: ascending numbers of the rows to keep, for each array; None, for one array or for all, keeps every row.

    Raises:
        ValueError: no arrays, or arrays of different dtypes or row shapes.
    """

    def __init__(
        self,
        arrays: Sequence[Shaped[np.ndarray, "n ..."] | StoredArray | Strings],
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
        """Type of the entries."""
        return self.arrays[0].dtype

    def take(self, rows: Int[np.ndarray, "m"]) -> Shaped[np.ndarray, "m ..."]:
        """A copy of the given rows, in the given order.

        Raises:
            IndexError: a row outside 0 to ``len(self)`` - 1.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of {len(self)}")
        out = np.empty((len(rows), *self.row_shape), self.dtype)
        # In ascending order, so that a disk is read forwards.
        order = rows.argsort(kind="stable")
        hit, first = np.unique(np.searchsorted(self.starts, rows[order], side="right") - 1, return_index=True)
        for index, chosen in zip(hit.tolist(), np.split(order, first[1:]), strict=False):
            out[chosen] = self._pick(index, rows[chosen] - self.starts[index])
        return out

    def read_into(self, out: Shaped[np.ndarray, "m ..."], start: int) -> None:
        """Fill ``out``, of any dtype, with the rows from ``start`` on."""
        at = start
        index = int(np.searchsorted(self.starts, start, side="right")) - 1
        while at < start + len(out):
            first, last = self.starts[index : index + 2].tolist()
            stop = min(start + len(out), last)
            out[at - start : stop - start] = self._pick(index, slice(at - first, stop - first))
            at, index = stop, index + 1

    def __getitem__(self, which: Any) -> Any:
        """A copy of one row by its number, or of the rows of a slice."""
        if not isinstance(which, slice):
            return self.take(np.array([which]))[0]
        start, stop, _ = which.indices(len(self))
        out = np.empty((max(0, stop - start), *self.row_shape), self.dtype)
        self.read_into(out, start)
        return out

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield from self[start : start + _ROWS_AT_ONCE]

    def _pick(self, index: int, which: Int[np.ndarray, "m"] | slice) -> Shaped[np.ndarray, "m ..."]:
        kept = self.kept[index]
        return self.arrays[index][which if kept is None else kept[which]]
