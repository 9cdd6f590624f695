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

_SCALARS = {"int": "int64"}
_TEXT = ("str", "json")
# The first column of a batch.
_ID = "sample_id"
_IDS_AT_ONCE = 1 << 16
_REMEDY = "prepare them with this package"


@dataclass(frozen=True)
class Column:
    """Position and type of a fixed-size column."""

    name: str
    encoding: str
    dtype: np.dtype
    shape: tuple[int, ...]
    fixed_before: int
    """Bytes of the fixed-size columns before it."""
    variable_before: int
    """Number of variable-size columns before it."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize * math.prod(self.shape)


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
        if not len(set(names)) == len(names) == len(encodings) == len(sizes):
            raise UserError(f"columns {', '.join(names)} of the shards: some are listed twice, or have no size")
        if _ID not in names:
            raise UserError(f"the shards have no column {_ID!r}, only {', '.join(names)}; {_REMEDY}")
        columns, fixed, variable = [], 0, 0
        for name, encoding, size in zip(names, encodings, sizes, strict=True):
            if not size:
                if encoding not in _TEXT:
                    raise UserError(f"column {name!r} of the shards ({encoding}) has no fixed size; {_REMEDY}")
                variable += 1
                continue
            dtype, shape = _numbers(name, encoding)
            columns.append(Column(name, encoding, dtype, shape, fixed, variable))
            if columns[-1].num_bytes != size:
                raise UserError(f"column {name!r} of the shards ({encoding}) cannot have {size} bytes; {_REMEDY}")
            fixed += size
        columns.sort(key=lambda column: column.name != _ID)
        return cls(tuple(columns), variable, fixed)


def _numbers(name: str, encoding: str) -> tuple[np.dtype, tuple[int, ...]]:
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":") if kind == "ndarray" else (_SCALARS.get(kind, kind), "", "")
    try:
        sizes = [int(extent) for extent in shape.split(",")] if shape else []
        if min(sizes, default=1) < 1:
            raise ValueError
        return torch.from_numpy(np.empty(0, dtype)).numpy().dtype, tuple(sizes)
    except (TypeError, ValueError):
        raise UserError(f"column {name!r} of the shards ({encoding}) does not hold numbers; {_REMEDY}") from None


@dataclass(frozen=True)
class ShardFile:
    """Index entry of one uncompressed shard."""

    path: Path
    num_samples: int
    num_bytes: int
    layout: Layout

    def __post_init__(self) -> None:
        """Check the sizes against each other.

        Raises:
            UserError: the samples do not fit in the file.
        """
        least = 4 + 4 * self.layout.num_variable + self.layout.num_fixed_bytes
        if not 8 + self.num_samples * least <= self.num_bytes < 1 << 32:
            sizes = f"{self.num_samples} samples in {self.num_bytes} bytes"
            raise UserError(f"{self.path}: the index lists {sizes}, which is impossible; copy the shards again")

    @classmethod
    def of(cls, folder: Path, info: Mapping[str, Any]) -> ShardFile:
        """Read an entry of ``shards`` in ``folder``/index.json.

        Raises:
            UserError: the shard is not MDS, or see ``Layout.of``.
        """
        if (info.get("format"), info.get("version")) != ("mds", 2):
            raise UserError(f"{folder / 'index.json'}: lists shards that are not MDS version 2; prepare them again")
        layout = Layout.of(info["column_names"], info["column_encodings"], info["column_sizes"])
        raw = info["raw_data"]
        path = inside(folder, raw["basename"], folder / "index.json")
        return cls(path, int(info["samples"]), int(raw["bytes"]), layout)


class _Map:
    """One memory-mapped shard; rows are copied by byte offset, whatever their alignment."""

    def __init__(self, file: ShardFile) -> None:
        size = file.path.stat().st_size
        if size != file.num_bytes:
            raise ValueError(f"{size} bytes instead of {file.num_bytes}")
        # Not numpy.memmap, which keeps a file open: a member may have thousands of shards.
        self._owner = torch.from_file(str(file.path), shared=False, size=size, dtype=torch.uint8)
        content = self._owner.numpy()
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
        self._layout = layout
        self._content = content
        # Overlapping items: item i begins at byte i.
        self._items: dict[str, np.ndarray] = {
            column.name: np.ndarray(
                (size - column.num_bytes + 1,), np.dtype((np.void, column.num_bytes)), content, strides=(1,)
            )
            for column in layout.columns
        }
        self._sizes: np.ndarray = np.ndarray((size - 3,), np.dtype((np.void, 4)), content, strides=(1,))

    def gather(self, rows: Int[np.ndarray, "m"], out: dict[str, np.ndarray], places: Int[np.ndarray, "m"]) -> None:
        """Copy ``rows`` to ``places`` of the columns in ``out``, one item per sample."""
        begin = self._offsets[rows].astype(np.int64)
        # Entry v: begin of the fixed-size columns after v variable-size columns.
        shifts = [begin + 4 * self._layout.num_variable]
        if self._layout.num_variable == 1:
            length = self._offsets[rows + 1].astype(np.int64) - begin
            shifts.append(begin + length - self._layout.num_fixed_bytes)
        else:
            for variable in range(self._layout.num_variable):
                shifts.append(shifts[-1] + self._sizes[begin + 4 * variable].view(np.uint32))
        for column in self._layout.columns:
            if column.name not in out:
                continue
            items = self._items[column.name]
            out[column.name][places] = items[shifts[column.variable_before] + column.fixed_before]


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
        wanted = set(sample_ids.tolist())
        for start in range(0, len(self), _IDS_AT_ONCE):
            rows = np.arange(start, min(start + _IDS_AT_ONCE, len(self)))
            for row, found in enumerate(self.take(rows, ("sample_id",))["sample_id"].tolist()):
                if found in wanted:
                    places[found] = start + row
        return np.array([places[sample_id] for sample_id in sample_ids.tolist()], np.int64)

    def take(self, ids: Int[np.ndarray, "m"], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """One batch, in the order of ``ids``.

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
