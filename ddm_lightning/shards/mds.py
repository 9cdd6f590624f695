"""The reader of MDS shards: whole batches through memory maps, or single samples of any file.

A shard (MosaicML Streaming, format version 2) consists of the number of samples n, n + 1 offsets, all uint32, the
columns as JSON, and the samples. A sample consists of the sizes of its variable-size columns, uint32, and then its
columns in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.encoders.interfaces import parse_encoding
from ddm_lightning.shards.manifest import IMAGE_COLUMNS
from ddm_lightning.shards.mosaic import decompress
from ddm_lightning.shards.verify import Entry, Shard, read_index, unreadable

Ids: TypeAlias = Int[np.ndarray, "m"]
"""Positions of samples, or of rows in one shard."""
_TEXT = ("str", "json")
# Linux allows a process 65,530 maps.
_MAX_MAPS = 1 << 14


@dataclass(frozen=True)
class Column:
    """Type of a column of fixed size, or of a text."""

    name: str
    encoding: str
    dtype: np.dtype
    shape: tuple[int, ...]
    num_bytes: int
    """Bytes of one value; 0 for a text."""


def _columns(entry: Entry) -> list[Column]:
    columns = []
    try:
        for name, encoding in zip(entry.column_names, entry.column_encodings, strict=True):
            if encoding in _TEXT:
                columns.append(Column(name, encoding, np.dtype(np.uint8), (), 0))
            else:
                dtype, shape = parse_encoding(encoding)
                columns.append(Column(name, encoding, dtype, shape, dtype.itemsize * math.prod(shape)))
    except ValueError as error:
        raise UserError(f"the shards' columns: {error}; prepare them with this package") from None

    return columns


def _kind(entry: Entry) -> tuple[str, ...]:
    """Names and encodings of the columns, without the shapes of images."""
    columns = dict(zip(entry.column_names, entry.column_encodings, strict=False))  # ``_columns`` compares the lengths
    for name in columns.keys() & IMAGE_COLUMNS:
        columns[name] = columns[name].rpartition(":")[0]

    return (*entry.column_names, *columns.values())


class _Map:
    """One shard in memory, mapped if it is not compressed; rows are copied by byte offset, whatever their alignment."""

    def __init__(self, shard: Shard, columns: Sequence[Column]) -> None:
        content = _content(shard)
        count = int(content[:4].view(np.uint32)[0])
        if count != shard.entry.samples:
            raise ValueError(f"holds {count} samples instead of {shard.entry.samples}")

        self._offsets = content[4 : 8 + 4 * count].view(np.uint32)
        self._columns = columns
        self._content = content
        sizes = [column.num_bytes for column in columns]
        self._header = 4 * sizes.count(0)
        least = self._header + sum(sizes)
        lengths = np.diff(self._offsets.astype(np.int64))
        fits = lengths >= least if self._header else lengths == least
        if not fits.all() or self._offsets[-1] != len(content) or self._offsets[0] < 8 + 4 * count:
            raise ValueError("its samples do not have the columns that the index lists")

    def gather(self, rows: Ids, out: dict[str, np.ndarray], places: Ids) -> None:
        """Copy ``rows`` to ``places`` of the columns in ``out``, one item per sample."""
        for column, begin, _ in self._spans(rows):
            if column.name in out:
                out[column.name][places] = self._items(column.num_bytes)[begin]

    def texts(self, rows: Ids, name: str) -> list[str]:
        """Return a text column of ``rows``."""
        for column, begin, end in self._spans(rows):
            if column.name == name:
                spans = zip(begin, end, strict=True)
                return [self._content[first:last].tobytes().decode() for first, last in spans]

        raise KeyError(name)

    def _spans(self, rows: Ids) -> Iterator[tuple[Column, Ids, Ids]]:
        """Yield each column with the bytes at which its values begin and end."""
        header = self._offsets[rows].astype(np.int64)
        begin = header + self._header
        for column in self._columns:
            if column.num_bytes:
                end = begin + column.num_bytes
            else:
                end = begin + self._items(4)[header].view(np.uint32)[:, 0]
                header = header + 4

            yield column, begin, end
            begin = end

    def _items(self, num_bytes: int) -> np.ndarray:
        """View the file as overlapping rows of ``num_bytes``; row i begins at byte i.

        NumPy copies rows of bytes without Python's lock, which it keeps while it copies items of a void type.
        """
        shape = (len(self._content) - num_bytes + 1, num_bytes)
        return np.ndarray(shape, np.uint8, self._content, strides=(1, 1))


def _content(shard: Shard) -> np.ndarray:
    if shard.packed is not None and not shard.path.is_file():
        return np.frombuffer(decompress(shard.entry.compression, shard.packed.read_bytes()), np.uint8)

    # Not numpy.memmap, which keeps a file open: a member may have thousands of shards.
    return torch.from_file(str(shard.path), shared=False, size=shard.path.stat().st_size, dtype=torch.uint8).numpy()


class Shards:
    """Samples of several shards, concatenated. A file is mapped when one of its samples is first needed.

    Args:
        shards: in this order; consecutive ones may differ in the shape of images.

    Attributes:
        columns: those of the first shard.
        parts: sizes of consecutive shards with images of one shape.

    Raises:
        UserError: there are none, or their columns differ or do not fit a batch or a file.
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        kinds = {_kind(shard.entry) for shard in shards}
        if len(kinds) != 1:
            where = sorted({str(shard.path.parent) for shard in shards})
            raise UserError(f"{', '.join(where) or 'shards'}: need at least one shard, and all with the same columns")

        self.shards = shards
        self.parts: list[list[int]] = []
        self._columns: list[list[Column]] = []
        for _, group in groupby(shards, lambda shard: (shard.entry.column_names, shard.entry.column_encodings)):
            part = [*group]
            columns = _columns(part[0].entry)
            least = sum(column.num_bytes for column in columns)
            for shard in part:
                num_bytes = shard.entry.raw_data.bytes
                if shard.entry.samples * least > num_bytes:
                    raise unreadable(f"{shard.path}: {shard.entry.samples} samples in {num_bytes} bytes are impossible")

            self._columns += [columns] * len(part)
            self.parts.append([shard.entry.samples for shard in part])

        self.columns = self._columns[0]
        self.sizes = [*chain(*self.parts)]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._maps: dict[int, _Map] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def shards_of(self, ids: Ids) -> Ids:
        """Return the shard of each sample."""
        return np.searchsorted(self._starts, ids, side="right") - 1

    def take(self, ids: Ids, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return one batch, in the order of ``ids``.

        Args:
            ids: positions of the samples; their images, if taken, have one shape.
            names: columns; None for all.

        Returns:
            Every fixed-size column: integers as int64 ``[m]``, ``text`` as float32, all others as stored.

        Raises:
            ShardError: a shard is missing, or differs from its index entry.
        """
        columns = []
        for column in self._columns[min(self.shards_of(ids), default=0)]:
            if column.num_bytes and (names is None or column.name in names):
                columns.append(column)

        batch = {}
        items = {}
        for column in columns:
            values = np.empty((len(ids), *column.shape), column.dtype)
            batch[column.name] = values
            items[column.name] = values.reshape(len(ids), -1).view(np.uint8)

        self._visit(ids, lambda shard, rows, places: shard.gather(rows, items, places))
        return {column.name: _as_tensor(column, batch[column.name]) for column in columns}

    def texts(self, ids: Ids, name: str) -> list[str]:
        """Return a column of texts, such as ``caption``, in the order of ``ids``.

        Raises:
            ShardError: as ``take``.
        """
        found = [""] * len(ids)

        def visit(shard: _Map, rows: Ids, places: Ids) -> None:
            for place, text in zip(places, shard.texts(rows, name), strict=True):
                found[place] = text

        self._visit(ids, visit)
        return found

    def _visit(self, ids: Ids, visit: Callable[[_Map, np.ndarray, np.ndarray], object]) -> None:
        """Call ``visit`` for each shard that is needed, with its rows and their places in ``ids``."""
        needed = self.shards_of(ids)
        by_shard = np.argsort(needed, kind="stable")
        found, first = np.unique(needed[by_shard], return_index=True)
        for shard, places in zip(found.tolist(), np.split(by_shard, first[1:]), strict=True):
            try:
                visit(self._map(shard), ids[places] - self._starts[shard], places)
            except Exception as error:  # each compression raises its own
                raise unreadable(f"{self.shards[shard].path}: {first_line(error)}") from error

    def _map(self, number: int) -> _Map:
        found = self._maps.get(number)
        if found is None:
            shard = self.shards[number]
            found = _Map(shard, self._columns[number])
            if shard.packed is None or shard.path.is_file():  # otherwise it is in memory
                self._maps[number] = found

            for oldest in list(self._maps)[:-_MAX_MAPS]:
                self._maps.pop(oldest, None)

        return found


def _as_tensor(column: Column, values: np.ndarray) -> Tensor:
    if not column.shape and column.dtype.kind in "iu":
        return torch.from_numpy(values.astype(np.int64))

    tensor = torch.from_numpy(values)
    if column.name == "text":
        return tensor.float()

    return tensor


def open_shards(folders: Sequence[Path]) -> Shards:
    """Open the shards of some MDS folders, one after the other; compressed ones are decompressed whenever used.

    Raises:
        UserError: they cannot be read together.
    """
    return Shards([shard for folder in folders for shard in read_index(folder)])


def read_samples(file: BinaryIO, num_samples: int, numbers: range) -> list[bytes]:
    """Read consecutive samples of one shard that is not compressed.

    Raises:
        ValueError: its length differs from its header.
    """
    found = int.from_bytes(file.read(4), "little")
    offsets = np.frombuffer(file.read(4 * (found + 1)), np.uint32).astype(np.int64)
    bounds = offsets[numbers.start : numbers.stop + 1] - offsets[numbers.start]
    file.seek(int(offsets[numbers.start]))
    data = file.read(int(bounds[-1]))
    if found != num_samples or (np.diff(bounds) < 0).any() or bounds[-1] != len(data):
        raise ValueError("its length differs from its header")

    return [data[first:last] for first, last in pairwise(bounds.tolist())]


def split_sample(sample: bytes, sizes: Sequence[int | None]) -> list[bytes]:
    """Return the encoded value of each column; ``sizes`` holds their bytes, None if these vary.

    Raises:
        ValueError: its length differs from its header.
    """
    num_variable = sum(not size for size in sizes)
    stream = BytesIO(sample)
    lengths = [size or int.from_bytes(stream.read(4), "little") for size in sizes]
    if 4 * num_variable + sum(lengths) != len(sample):
        raise ValueError("its length differs from its header")

    return [stream.read(length) for length in lengths]
