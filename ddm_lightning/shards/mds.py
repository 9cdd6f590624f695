"""The reader of MDS shards: whole batches through memory maps, or single samples of any file.

A shard (MosaicML Streaming, format version 2) consists of the number of samples n, n + 1 offsets, all uint32, the
columns as JSON, and the samples. A sample consists of the sizes of its variable-size columns, uint32, and then its
columns in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import inside
from ddm_lightning.encoders.interfaces import parse_encoding
from ddm_lightning.shards.mosaic import decompress
from ddm_lightning.shards.verify import read_index, unreadable

Ids: TypeAlias = Int[np.ndarray, "m"]
"""Positions of samples, or of rows in one shard."""
_TEXT = ("str", "json")
# The first column of a batch.
_ID = "sample_id"
# Linux allows a process 65,530 maps.
_MAX_MAPS = 1 << 14


@dataclass(frozen=True)
class Column:
    """Position and type of a column of fixed size, or of a text."""

    name: str
    encoding: str
    dtype: np.dtype
    shape: tuple[int, ...]
    num_bytes: int
    """Bytes of one value; 0 for a text."""
    fixed_before: int
    """Bytes of the fixed-size columns before it."""
    variable_before: int
    """Number of variable-size columns before it."""


@dataclass(frozen=True)
class Layout:
    """The columns of a shard."""

    columns: tuple[Column, ...]
    """Those of fixed size, which batches hold."""
    texts: tuple[Column, ...]
    """Captions and other texts, in order."""
    num_fixed_bytes: int

    @classmethod
    def of(cls, names: Sequence[str], encodings: Sequence[str], sizes: Sequence[int | None]) -> Layout:
        """Make a layout of ``column_names``, ``column_encodings`` and ``column_sizes`` in ``index.json``.

        Raises:
            UserError: there is no ``sample_id``, or a column does not fit a batch.
        """
        if not len(set(names)) == len(names) == len(encodings) == len(sizes) or _ID not in names:
            raise _refusal(f"{', '.join(names)}: {_ID!r} is missing, or some are listed twice or have no size")

        columns: list[Column] = []
        texts: list[Column] = []
        fixed = 0
        for name, encoding, size in zip(names, encodings, sizes, strict=True):
            if encoding in _TEXT:
                texts.append(Column(name, encoding, np.dtype(np.uint8), (), 0, fixed, len(texts)))
                continue

            try:
                dtype, shape = parse_encoding(encoding)
            except ValueError as error:
                raise _refusal(f"{name!r}: {error}") from None

            if dtype.itemsize * math.prod(shape) != size:
                raise _refusal(f"{name!r} ({encoding}) cannot have {size} bytes")

            columns.append(Column(name, encoding, dtype, shape, size, fixed, len(texts)))
            fixed += size

        columns.sort(key=lambda column: column.name != _ID)
        return cls(tuple(columns), tuple(texts), fixed)

    @property
    def num_sample_bytes(self) -> int:
        """Bytes of a sample with empty texts."""
        return 4 * len(self.texts) + self.num_fixed_bytes


def _refusal(problem: str) -> UserError:
    return UserError(f"the shards' columns: {problem}; prepare them with this package")


@dataclass(frozen=True)
class ShardFile:
    """Index entry of one shard."""

    path: Path
    num_samples: int
    num_bytes: int
    """Its bytes, uncompressed."""
    layout: Layout
    packed: Path | None = None
    """The compressed file, if there is one; it is read if ``path`` does not exist."""
    compression: str | None = None
    """How it is compressed."""

    @classmethod
    def of(cls, folder: Path, info: Mapping[str, Any]) -> ShardFile:
        """Read an entry of ``shards`` in ``folder``/index.json.

        Raises:
            UserError: the shard is not MDS, its samples do not fit in its file, or see ``Layout.of``.
        """
        index = folder / "index.json"
        raw = info["raw_data"]
        num_samples = int(info["samples"])
        if (info.get("format"), info.get("version")) != ("mds", 2):
            raise UserError(f"{index}: lists shards that are not MDS version 2; prepare them again")

        path = inside(folder, raw["basename"], index)
        layout = Layout.of(info["column_names"], info["column_encodings"], info["column_sizes"])
        least = 8 + num_samples * (4 + layout.num_sample_bytes)
        if not least <= raw["bytes"] < 1 << 32:
            raise UserError(
                f"{index}: lists {num_samples} samples in {raw['bytes']} bytes, which is impossible; "
                "copy the shards again"
            )

        packed = None
        if info["zip_data"]:
            packed = inside(folder, info["zip_data"]["basename"], index)

        return cls(path, num_samples, raw["bytes"], layout, packed, info.get("compression"))


class _Map:
    """One shard in memory, mapped if it is not compressed; rows are copied by byte offset, whatever their alignment."""

    def __init__(self, file: ShardFile) -> None:
        content = _content(file)
        size = len(content)
        if size != file.num_bytes:
            raise ValueError(f"{size} bytes instead of {file.num_bytes}")

        count = int(content[:4].view(np.uint32)[0])
        if count != file.num_samples:
            raise ValueError(f"holds {count} samples instead of {file.num_samples}")

        self._offsets = content[4 : 8 + 4 * count].view(np.uint32)
        lengths = np.diff(self._offsets.astype(np.int64))
        least = file.layout.num_sample_bytes
        fits = lengths >= least if file.layout.texts else lengths == least
        if not fits.all() or self._offsets[-1] != size or self._offsets[0] < 8 + 4 * count:
            raise ValueError("its samples do not have the columns that the index lists")

        self._layout = file.layout
        self._content = content

    def gather(self, rows: Ids, out: dict[str, np.ndarray], places: Ids) -> None:
        """Copy ``rows`` to ``places`` of the columns in ``out``, one item per sample."""
        begins = self._begins(rows)
        for column in self._layout.columns:
            if column.name in out:
                items = self._items(column.num_bytes)
                out[column.name][places] = items[begins[column.variable_before] + column.fixed_before]

    def texts(self, rows: Ids, name: str) -> list[str]:
        """Return a text column of ``rows``."""
        (column,) = (column for column in self._layout.texts if column.name == name)
        begins = self._begins(rows)
        first = begins[column.variable_before] + column.fixed_before
        end = begins[column.variable_before + 1] + column.fixed_before
        return [self._content[start:stop].tobytes().decode() for start, stop in zip(first, end, strict=True)]

    def _begins(self, rows: Ids) -> list[Ids]:
        """Return, for each v, where a row's columns after v texts begin, without fixed-size columns before."""
        begin = self._offsets[rows].astype(np.int64)
        num_texts = len(self._layout.texts)
        begins = [begin + 4 * num_texts]
        for text in range(num_texts):
            length = self._items(4)[begin + 4 * text].view(np.uint32)[:, 0]
            begins.append(begins[-1] + length)

        return begins

    def _items(self, num_bytes: int) -> np.ndarray:
        """View the file as overlapping rows of ``num_bytes``; row i begins at byte i.

        NumPy copies rows of bytes without Python's lock, which it keeps while it copies items of a void type.
        """
        shape = (len(self._content) - num_bytes + 1, num_bytes)
        return np.ndarray(shape, np.uint8, self._content, strides=(1, 1))


def _content(file: ShardFile) -> np.ndarray:
    if file.packed is not None and not file.path.is_file():
        return np.frombuffer(decompress(file.compression, file.packed.read_bytes()), np.uint8)

    # Not numpy.memmap, which keeps a file open: a member may have thousands of shards.
    return torch.from_file(str(file.path), shared=False, size=file.path.stat().st_size, dtype=torch.uint8).numpy()


class Shards:
    """Samples of several shards, concatenated. A file is mapped when one of its samples is first needed.

    Args:
        files: the shards.

    Raises:
        UserError: there are no shards, or their columns differ.
    """

    def __init__(self, files: Sequence[ShardFile]) -> None:
        if len({file.layout for file in files}) != 1:
            where = sorted({str(file.path.parent) for file in files})
            raise UserError(f"{', '.join(where) or 'shards'}: need at least one shard, and all with the same columns")

        self.files = list(files)
        self.layout = files[0].layout
        self.sizes = [file.num_samples for file in files]
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
            ids: positions of the samples.
            names: columns; None for all.

        Returns:
            ``sample_id`` int64 ``[m]`` first; then every other fixed-size column: integers as int64 ``[m]``, ``text``
            as float32, all others as stored.

        Raises:
            ShardError: a shard is missing, or differs from its index entry.
        """
        columns = [column for column in self.layout.columns if names is None or column.name in names]
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
        shards = self.shards_of(ids)
        by_shard = np.argsort(shards, kind="stable")
        found, first = np.unique(shards[by_shard], return_index=True)
        for shard, places in zip(found.tolist(), np.split(by_shard, first[1:]), strict=True):
            path = self.files[shard].path
            try:
                visit(self._map(shard), ids[places] - self._starts[shard], places)
            except IndexError as error:
                raise unreadable(f"{path}: a sample ends after the file") from error
            except Exception as error:  # each compression raises its own
                raise unreadable(f"{path}: {first_line(error)}") from error

    def _map(self, shard: int) -> _Map:
        file = self.files[shard]
        found = self._maps.get(shard)
        if found is None:
            found = _Map(file)
            if file.packed is None or file.path.is_file():  # otherwise it is in memory
                self._maps[shard] = found

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
    return Shards([ShardFile.of(folder, info) for folder in folders for info in read_index(folder)])


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
