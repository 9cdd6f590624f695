"""Columns on disk: arrays and strings whose rows are read when asked for, and many files read as one column."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
from jaxtyping import Int, Shaped

from ddm_lightning.core.errors import UserError, first_line

RowNumbers: TypeAlias = Int[np.ndarray, "m"]
_ROWS_AT_ONCE = 65_536


class GrowingArray(AbstractContextManager["GrowingArray"]):
    """``.npy`` file to which rows are appended; none of them stays in memory.

    A context manager: the file is complete when its block ends without an error.

    Args:
        path: the file; replaced if it exists.
        dtype: type of the numbers.
        row_shape: shape of one row.
    """

    def __init__(self, path: Path, dtype: np.dtype, row_shape: tuple[int, ...]) -> None:
        self._file = path.open("wb")
        self.dtype = np.dtype(dtype)
        self.row_shape = row_shape
        self.num_rows = 0
        self._write_header()

    def append(self, rows: Shaped[np.ndarray, "n ..."]) -> None:
        """Append rows, cast to the type of the file.

        Raises:
            ValueError: the rows have another shape.
        """
        if rows.shape[1:] != self.row_shape:
            raise ValueError(f"rows of shape {rows.shape[1:]} for a column of {self.row_shape}")

        self._file.write(np.ascontiguousarray(rows, self.dtype).data)
        self.num_rows += len(rows)

    def _write_header(self) -> None:
        # NumPy pads the header so that the first dimension may grow in place.
        header = {"shape": (self.num_rows, *self.row_shape), "fortran_order": False, "descr": self.dtype.str}
        np.lib.format.write_array_header_1_0(self._file, header)  # type: ignore[no-untyped-call]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                self._write_header()


def save_array(path: Path, array: Shaped[np.ndarray, "n ..."]) -> None:
    """Write an ``.npy`` file. Unlike ``numpy.save``, name a full disk as the reason of a failure."""
    with GrowingArray(path, array.dtype, array.shape[1:]) as file:
        file.append(array)


class StoredArray:
    """``.npy`` file whose rows are read when asked for; between reads it is neither open nor mapped.

    A process may therefore use any number of them.

    Args:
        path: the file; its header is read.
    """

    def __init__(self, path: Path) -> None:
        stored = np.load(path, mmap_mode="r")
        self.path = path
        self.dtype = stored.dtype
        self.shape = stored.shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice | RowNumbers) -> Shaped[np.ndarray, "m ..."]:
        """Return a copy of these rows.

        Raises:
            ValueError: the file has become shorter.
        """
        return np.asarray(np.load(self.path, mmap_mode="r"))[_numbers(which, len(self))]


@contextmanager
def opened(path: Path) -> Iterator[Mapping[str, np.ndarray]]:
    """Open an ``.npz`` file that ``prepare`` has written.

    Raises:
        UserError: the block fails, because the file is missing or damaged.
    """
    try:
        # Opened here, because NumPy leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream) as arrays:
            yield arrays
    except (OSError, ValueError, TypeError, KeyError, IndexError, EOFError, BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: is damaged or missing ({first_line(error)}); delete it and run prepare again"
        ) from None


class PackedStrings:
    """Strings in an ``.npz`` file, by ``packed_strings``; it is read whole whenever rows are asked for.

    Args:
        path: the file.
        name: name of the strings in it.
        num_rows: their number.
    """

    dtype = np.dtype(object)

    def __init__(self, path: Path, name: str, num_rows: int) -> None:
        self.path = path
        self.name = name
        self.shape = (num_rows,)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, which: slice | RowNumbers) -> Shaped[np.ndarray, "m"]:
        """Return these strings, as objects."""
        with opened(self.path) as arrays:
            text = arrays[self.name].tobytes()
            ends = arrays[f"{self.name}_ends"]
            bounds = np.concatenate([[0], ends])
            spans = zip(bounds[:-1][which], bounds[1:][which], strict=True)
            return np.array([text[start:end].decode() for start, end in spans], object)


def packed_strings(name: str, values: Sequence[str]) -> dict[str, Shaped[np.ndarray, "_"]]:
    """Return two arrays for an ``.npz`` file: the UTF-8 bytes of all strings, and where each string ends.

    Raises:
        UnicodeEncodeError: UTF-8 cannot hold a string (a lone surrogate).
    """
    encoded = [value.encode("utf-8") for value in values]
    ends = np.cumsum([len(value) for value in encoded], dtype=np.int64)
    return {name: np.frombuffer(b"".join(encoded), np.uint8), f"{name}_ends": ends}


def _numbers(which: slice | RowNumbers, num_rows: int) -> RowNumbers:
    if isinstance(which, slice):
        return np.arange(*which.indices(num_rows))

    return which


class Rows(Sequence[Any]):
    """Several arrays, such as one file per part, read as one; rows are copied when asked for.

    Args:
        arrays: at least one; equal in dtype and in all dimensions but the first.
        kept: ascending numbers of the rows to keep, for each array; None for one array, or nothing, keeps every row.

    Raises:
        ValueError: no arrays, or arrays of different dtypes or row shapes.
    """

    def __init__(
        self,
        arrays: Sequence[Shaped[np.ndarray, "n ..."] | StoredArray | PackedStrings],
        kept: Sequence[RowNumbers | None] = (),
    ) -> None:
        if not arrays or len({(array.dtype, array.shape[1:]) for array in arrays}) != 1:
            raise ValueError("rows need at least one array, all of one dtype and row shape")

        self.arrays = list(arrays)
        self.kept = list(kept) or [None] * len(self.arrays)
        sizes = []
        for a, k in zip(self.arrays, self.kept, strict=True):
            sizes.append(len(a if k is None else k))

        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        self.dtype: np.dtype = self.arrays[0].dtype
        self.row_shape = tuple(self.arrays[0].shape[1:])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: RowNumbers) -> Shaped[np.ndarray, "m ..."]:
        """Return a copy of the given rows, in the given order.

        Raises:
            IndexError: a row outside 0 to ``len(self)`` - 1.
        """
        out = np.empty((len(rows), *self.row_shape), self.dtype)
        # In ascending order, so that a disk is read forwards.
        order = rows.argsort(kind="stable")
        hit, first = np.unique(np.searchsorted(self.starts, rows[order], side="right") - 1, return_index=True)
        for index, chosen in zip(hit.tolist(), np.split(order, first[1:]), strict=False):
            kept = self.kept[index]
            local = rows[chosen] - self.starts[index]
            out[chosen] = self.arrays[index][local if kept is None else kept[local]]

        return out

    def __getitem__(self, which: Any) -> Any:
        """Return a copy of one row by its number, or of the rows of a slice."""
        if isinstance(which, slice):
            return self.take(_numbers(which, len(self)))

        return self.take(np.array([which]))[0]

    def __iter__(self) -> Iterator[Any]:
        # Many rows at a time, because a file of strings is read whole.
        for start in range(0, len(self), _ROWS_AT_ONCE):
            yield from self[start : start + _ROWS_AT_ONCE]
