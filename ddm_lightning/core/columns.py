"""Columns on disk: arrays that grow row by row, and strings; of both those rows are read that are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
from jaxtyping import Int, Shaped, UInt64


class GrowingArray:
    """An ``.npy`` file to which blocks of rows are appended; none of them stays in memory.

    A context manager: the file is whole when the block ends well.

    Args:
        path: the file, replaced if it is there.
        dtype: of the numbers.
        row_shape: shape of one row.
    """

    def __init__(self, path: Path, dtype: np.dtype, row_shape: tuple[int, ...]) -> None:
        self._file = path.open("wb")
        self.dtype, self.row_shape, self.num_rows = np.dtype(dtype), row_shape, 0
        self._write_header()

    def append(self, rows: Shaped[np.ndarray, "n ..."]) -> None:
        """Add rows, cast to the file's type.

        Raises:
            ValueError: rows of another shape.
        """
        if rows.shape[1:] != self.row_shape:
            raise ValueError(f"rows of shape {rows.shape[1:]} for a column of {self.row_shape}")
        self._file.write(np.ascontiguousarray(rows, self.dtype).data)
        self.num_rows += len(rows)

    def _write_header(self) -> None:
        # NumPy pads the header so that the first dimension may grow in place.
        description = {
            "shape": (self.num_rows, *self.row_shape),
            "fortran_order": False,
            "descr": self.dtype.str,
        }
        np.lib.format.write_array_header_1_0(self._file, description)  # type: ignore[no-untyped-call]

    def __enter__(self) -> GrowingArray:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._file.seek(0)
                self._write_header()
        finally:
            try:
                self._file.close()
            except OSError:
                if error is None:  # else of the same full disk
                    raise


def save_array(path: Path, array: Shaped[np.ndarray, "n ..."]) -> None:
    """Write an ``.npy`` file. ``numpy.save`` would not say of a full disk that it is full."""
    with GrowingArray(path, array.dtype, array.shape[1:]) as file:
        file.append(array)


@dataclass(frozen=True, eq=False)
class StoredArray:
    """An ``.npy`` file of which rows are read when they are asked for; in between it is neither open nor mapped.

    So a process may have any number of them, and what it has read is not counted as its memory.
    """

    path: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes before the first row."""

    @classmethod
    def of(cls, path: Path) -> StoredArray:
        """What the file's header says."""
        with path.open("rb") as file:
            np.lib.format.read_magic(file)  # type: ignore[no-untyped-call]
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)  # type: ignore[no-untyped-call]
            return cls(path, dtype, shape, file.tell())

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, which: slice | Int[np.ndarray, "m"]) -> Shaped[np.ndarray, "m ..."]:
        """A copy of these rows; those that lie one behind the other are read at once.

        Raises:
            OSError: the file is shorter than it was.
        """
        rows = _numbers(which, len(self))
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        row_bytes = self.nbytes // max(1, len(self))
        cuts = (np.flatnonzero(rows[1:] != rows[:-1] + 1) + 1).tolist() if len(rows) > 1 else []
        file = os.open(self.path, os.O_RDONLY)  # a file object takes longer to make than a row to read
        try:
            for first, last in pairwise([0, *cuts, len(rows)] if len(rows) else []):
                run = out[first:last].data
                if os.preadv(file, [run], self.offset + int(rows[first]) * row_bytes) != run.nbytes:
                    raise OSError(f"{self.path}: is shorter than it was; run prepare again")
        finally:
            os.close(file)
        return out


class Strings:
    """Strings in two files, ``NAME.bin`` (UTF-8, one behind the other) and ``NAME-ends.npy``; read as StoredArray is.

    Args:
        folder: of the files.
        name: of the files.
        ends: the second file, where it is known already.
    """

    dtype = np.dtype(object)

    def __init__(self, folder: Path, name: str, ends: StoredArray | None = None) -> None:
        self._blob, path = _files(folder, name)
        self._ends = StoredArray.of(path) if ends is None else ends
        self.shape = self._ends.shape

    def __len__(self) -> int:
        return len(self._ends)

    def num_bytes(self) -> UInt64[np.ndarray, "n"]:
        """Length of each string in UTF-8."""
        return np.diff(self._ends[:], prepend=np.uint64(0))

    def __getitem__(self, which: slice | Int[np.ndarray, "m"]) -> Shaped[np.ndarray, "m"]:
        """These strings, as objects."""
        rows = _numbers(which, len(self))
        around = np.union1d(rows - 1, rows)
        ends = np.where(around < 0, np.uint64(0), self._ends[np.maximum(around, 0)])
        spans = np.stack([ends[np.searchsorted(around, rows - 1)], ends[np.searchsorted(around, rows)]], 1)
        out = np.empty(len(rows), object)
        with self._blob.open("rb") as file:
            for place, (start, end) in enumerate(spans.tolist()):
                file.seek(start)
                out[place] = file.read(end - start).decode("utf-8")
        return out

    @staticmethod
    def write(folder: Path, name: str, values: Iterable[str]) -> None:
        """Write both files.

        Raises:
            UnicodeEncodeError: a string that UTF-8 cannot hold (a lone surrogate).
        """
        blob, ends = _files(folder, name)
        encoded = [value.encode("utf-8") for value in values]
        blob.write_bytes(b"".join(encoded))
        save_array(ends, np.cumsum([len(value) for value in encoded], dtype=np.uint64))


def _files(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.bin", folder / f"{name}-ends.npy"


def _numbers(which: slice | Int[np.ndarray, "m"], num_rows: int) -> Int[np.ndarray, "m"]:
    return np.arange(*which.indices(num_rows)) if isinstance(which, slice) else which
