"""Columns on disk: arrays that grow row by row, and strings, both read back as memory maps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import overload

import numpy as np
from jaxtyping import Shaped, UInt64


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


def open_array(path: Path) -> Shaped[np.ndarray, "n ..."]:
    """A read-only memory map of an ``.npy`` file."""
    if np.lib.format.open_memmap(path, mode="r").size == 0:  # type: ignore[no-untyped-call]
        return np.load(path, allow_pickle=False)  # a mapping cannot be empty
    mapped: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped


class Texts(Sequence[str]):
    """Strings of which each is read when it is asked for; a subclass says how."""

    def text(self, index: int) -> str:
        """The string at ``index``, from 0 to ``len(self)`` - 1."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        found = range(len(self))[index]
        return self.text(found) if isinstance(found, int) else [self.text(i) for i in found]


class Strings(Texts):
    """Strings in two files, ``NAME.bin`` (UTF-8, one behind the other) and ``NAME-ends.npy``; read one at a time."""

    def __init__(self, folder: Path, name: str) -> None:
        blob, ends = _files(folder, name)
        self._ends = open_array(ends)
        self._bytes = np.memmap(blob, np.uint8, "r") if len(self._ends) and self._ends[-1] else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def num_bytes(self) -> UInt64[np.ndarray, "n"]:
        """Length of each string in UTF-8."""
        return np.diff(self._ends, prepend=np.uint64(0))

    def text(self, index: int) -> str:
        """As ``Texts``."""
        start = int(self._ends[index - 1]) if index else 0
        return self._bytes[start : int(self._ends[index])].tobytes().decode("utf-8")

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
