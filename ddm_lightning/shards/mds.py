"""Whole batches gathered from MDS shards through memory maps.

A shard (MosaicML Streaming, format version 2) consists of the number of samples n, n + 1 offsets, all uint32, the
columns as JSON, and the samples. A sample consists of the sizes of its variable-size columns, uint32, and then its
columns in order.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import inside
from ddm_lightning.encoders.interfaces import parse_encoding
from ddm_lightning.shards.verify import read_index

_TEXT = ("str", "json")
# The first column of a batch.
_ID = "sample_id"
_IDS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Column:
    """Position and type of a fixed-size column."""

    name: str
    encoding: str
    dtype: np.dtype
    shape: tuple[int, ...]
    num_bytes: int
    """Bytes of one value."""
    fixed_before: int
    """Bytes of the fixed-size columns before it."""
    variable_before: int
    """Number of variable-size columns before it."""


@dataclass(frozen=True)
class Layout:
    """The fixed-size columns of a shard, which batches hold. Captions and other text are skipped."""

    columns: tuple[Column, ...]
    num_variable: int
    num_fixed_bytes: int

    @classmethod
    def of(cls, names: Sequence[str], encodings: Sequence[str], sizes: Sequence[int | None]) -> Layout:
        """Make a layout of ``column_names``, ``column_encodings`` and ``column_sizes`` in ``index.json``.

        Raises:
            UserError: there is no ``sample_id``, or a column does not fit a batch.
        """
        if not len(set(names)) == len(names) == len(encodings) == len(sizes) or _ID not in names:
            raise _refusal(f"{', '.join(names)}: {_ID!r} is missing, or some are listed twice or have no size")
        columns, fixed, variable = [], 0, 0
        for name, encoding, size in zip(names, encodings, sizes, strict=True):
            if not size:
                if encoding not in _TEXT:
                    raise _refusal(f"{name!r} ({encoding}) has no fixed size")
                variable += 1
                continue
            try:
                dtype, shape = parse_encoding(encoding)
            except ValueError as error:
                raise _refusal(f"{name!r}: {error}") from None
            if dtype.itemsize * math.prod(shape) != size:
                raise _refusal(f"{name!r} ({encoding}) cannot have {size} bytes")
            columns.append(Column(name, encoding, dtype, shape, size, fixed, variable))
            fixed += size
        columns.sort(key=lambda column: column.name != _ID)
        return cls(tuple(columns), variable, fixed)


def _refusal(problem: str) -> UserError:
    return UserError(f"the shards' columns: {problem}; prepare them with this package")


@dataclass(frozen=True)
class ShardFile:
    """Index entry of one uncompressed shard."""

    path: Path
    num_samples: int
    num_bytes: int
    layout: Layout

    @classmethod
    def of(cls, folder: Path, info: Mapping[str, Any]) -> ShardFile:
        """Read an entry of ``shards`` in ``folder``/index.json.

        Raises:
            UserError: the shard is not MDS, its samples do not fit in its file, or see ``Layout.of``.
        """
        index, raw, num_samples = folder / "index.json", info["raw_data"], int(info["samples"])
        if (info.get("format"), info.get("version")) != ("mds", 2):
            raise UserError(f"{index}: lists shards that are not MDS version 2; prepare them again")
        path = inside(folder, raw["basename"], index)
        layout = Layout.of(info["column_names"], info["column_encodings"], info["column_sizes"])
        least = 8 + num_samples * (4 + 4 * layout.num_variable + layout.num_fixed_bytes)
        if not least <= raw["bytes"] < 1 << 32:
            sizes = f"{num_samples} samples in {raw['bytes']} bytes"
            raise UserError(f"{index}: lists {sizes}, which is impossible; copy the shards again")
        return cls(path, num_samples, raw["bytes"], layout)


class _Map:
    """One memory-mapped shard; rows are copied by byte offset, whatever their alignment."""

    def __init__(self, file: ShardFile) -> None:
        size = file.path.stat().st_size
        if size != file.num_bytes:
            raise ValueError(f"{size} bytes instead of {file.num_bytes}")
        # Not numpy.memmap, which keeps a file open: a member may have thousands of shards.
        content = torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8).numpy()
        count = int(content[:4].view(np.uint32)[0])
        if count != file.num_samples:
            raise ValueError(f"holds {count} samples instead of {file.num_samples}")
        self._offsets = content[4 : 8 + 4 * count].view(np.uint32)
        layout = file.layout
        rows = np.diff(self._offsets.astype(np.int64))
        least = 4 * layout.num_variable + layout.num_fixed_bytes
        wrong = (rows < least) if layout.num_variable else (rows != least)
        if wrong.any() or self._offsets[-1] != size or self._offsets[0] < 8 + 4 * count:
            raise ValueError("its samples do not have the columns that the index lists")
        self._layout, self._content = layout, content

    def gather(self, rows: Int[np.ndarray, "m"], out: dict[str, np.ndarray], places: Int[np.ndarray, "m"]) -> None:
        """Copy ``rows`` to ``places`` of the columns in ``out``, one item per sample."""
        begin = self._offsets[rows].astype(np.int64)
        # Entry v: begin of the fixed-size columns after v variable-size columns.
        shifts = [begin + 4 * self._layout.num_variable]
        for variable in range(self._layout.num_variable):
            shifts.append(shifts[-1] + self._items(4)[begin + 4 * variable].view(np.uint32))
        for column in self._layout.columns:
            if column.name in out:
                items = self._items(column.num_bytes)
                out[column.name][places] = items[shifts[column.variable_before] + column.fixed_before]

    def _items(self, num_bytes: int) -> np.ndarray:
        """View the file as overlapping items of ``num_bytes``; item i begins at byte i."""
        shape = (len(self._content) - num_bytes + 1,)
        return np.ndarray(shape, np.dtype((np.void, num_bytes)), self._content, strides=(1,))


class Shards:
    """Samples of several shards, concatenated. A file is mapped when one of its samples is first needed.

    Raises:
        UserError: there are no shards, or their columns differ.
    """

    def __init__(self, files: Sequence[ShardFile]) -> None:
        if not files or any(file.layout != files[0].layout for file in files):
            where = sorted({str(file.path.parent) for file in files})
            raise UserError(f"{', '.join(where) or 'shards'}: need at least one shard, and all with the same columns")
        self.files = list(files)
        self.layout = files[0].layout
        self.sizes = [file.num_samples for file in files]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])
        self._maps: dict[int, _Map] = {}

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": {}}  # a spawned worker maps the files itself

    def shards_of(self, ids: Int[np.ndarray, "m"]) -> Int[np.ndarray, "m"]:
        """Return the shard of each sample."""
        return np.searchsorted(self._starts, ids, side="right") - 1

    def find(self, sample_ids: Int[np.ndarray, "m"]) -> Int[np.ndarray, "m"]:
        """Return the positions of samples for ``take``; reads nothing but the ids.

        Raises:
            KeyError: a sample is missing.
            ValueError, OSError: as ``take``.
        """
        places: dict[int, int] = {}
        for start in range(0, len(self), _IDS_AT_ONCE):
            rows = np.arange(start, min(start + _IDS_AT_ONCE, len(self)))
            found = self.take(rows, (_ID,))[_ID].numpy()
            wanted = np.isin(found, sample_ids)
            places.update(zip(found[wanted].tolist(), rows[wanted].tolist(), strict=True))
        return np.array([places[sample_id] for sample_id in sample_ids.tolist()], np.int64)

    def take(self, ids: Int[np.ndarray, "m"], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return one batch, in the order of ``ids``.

        Args:
            ids: positions of the samples.
            names: columns; None for all.

        Returns:
            ``sample_id`` int64 ``[m]`` first; then every other fixed-size column: integers as int64 ``[m]``, ``text``
            as float32, all others as stored.

        Raises:
            ValueError, OSError: a shard differs from its index entry; the message begins with its path.
        """
        columns = [column for column in self.layout.columns if names is None or column.name in names]
        batch = {column.name: np.empty((len(ids), *column.shape), column.dtype) for column in columns}
        items = {
            column.name: batch[column.name].reshape(len(ids), -1).view((np.void, column.num_bytes)).reshape(-1)
            for column in columns
        }
        shards = self.shards_of(ids)
        by_shard = np.argsort(shards, kind="stable")
        found, first = np.unique(shards[by_shard], return_index=True)
        for shard, places in zip(found.tolist(), np.split(by_shard, first[1:]), strict=True):
            try:
                self._map(shard).gather(ids[places] - self._starts[shard], items, places)
            except IndexError:
                raise ValueError(f"{self.files[shard].path}: a sample ends after the file") from None
        return {column.name: _as_tensor(column, batch[column.name]) for column in columns}

    def _map(self, shard: int) -> _Map:
        if shard not in self._maps:
            try:
                self._maps[shard] = _Map(self.files[shard])
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{self.files[shard].path}: {error}") from error
        return self._maps[shard]


def _as_tensor(column: Column, values: np.ndarray) -> Tensor:
    if not column.shape and column.dtype.kind in "iu":
        return torch.from_numpy(values.astype(np.int64))
    tensor = torch.from_numpy(values)
    return tensor.float() if column.name == "text" else tensor


def open_shards(folders: Sequence[Path]) -> Shards:
    """Open the uncompressed shards of some MDS folders, one after the other.

    Raises:
        UserError: they cannot be read together.
    """
    return Shards([ShardFile.of(folder, info) for folder in folders for info in read_index(folder)])
