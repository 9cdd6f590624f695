"""Sources that read Arrow tables: Parquet files, and data sets saved by Hugging Face's ``datasets``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import Broken, Part, Record
from ddm_lightning.prepare.sources.columns import PARAMS, TableSource
from ddm_lightning.prepare.sources.urls import BLOCK_SIZE, WatchedFile, block_parts

if TYPE_CHECKING:
    import pyarrow.parquet

_ROWS_AT_ONCE = 32  # turned into Python objects at a time: images of some megabytes must not pile up
_FILE_FORMAT = b"ARROW1"


class _ArrowSource(TableSource):
    packages = ("pillow", "pyarrow")
    needs = ("pyarrow",)

    def parts(self) -> list[Part]:
        """List blocks of rows; reads the table of contents of every file.

        Raises:
            UserError: no file, a damaged one, or one without a column.
        """
        return self._parts

    @cached_property
    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        for file in self._names:
            with self._open_whole(file) as opened:
                self._check_schema(self._schema(opened), self.files.shown(file))
                parts += self._parts_of(file, opened)
        return parts

    @cached_property
    def _names(self) -> list[str]:
        raise NotImplementedError

    def _parts_of(self, file: str, opened: Any) -> list[Part]:
        raise NotImplementedError

    def _schema(self, opened: Any) -> pyarrow.Schema:
        raise NotImplementedError

    def _open(self, file: str) -> Any:
        return self.files.open(file)

    def stored_class_names(self) -> list[str] | None:
        """Names of a Hugging Face ``ClassLabel`` column."""
        with self._open_whole(self._names[0]) as opened:
            metadata = self._schema(opened).metadata or {}
        try:
            feature = json.loads(metadata[b"huggingface"])["info"]["features"][self.label]
            return feature["names"] if feature["_type"] == "ClassLabel" else None
        except (KeyError, ValueError, TypeError):
            return None

    @contextmanager
    def _open_whole(self, file: str) -> Iterator[Any]:
        """Open a file; any damage is a ``UserError``."""
        import pyarrow

        opened = None
        try:
            with self._open(file) as opened:
                yield opened
        except (pyarrow.ArrowException, OSError) as error:
            _raise_failure(opened)
            problem = " ".join(str(error).split())
            raise UserError(f"{self.files.shown(file)} is not a whole table: {problem}; save it again") from error

    def _check_schema(self, schema: pyarrow.Schema, place: str) -> None:
        import pyarrow.types as types

        self.check_columns(schema.names, place)
        kind = schema.field(self.image).type
        tests = (types.is_binary, types.is_large_binary, types.is_string, types.is_large_string, types.is_struct)
        if not any(test(kind) for test in (*tests, types.is_fixed_size_binary)):
            raise UserError(
                f"key '{PARAMS}.image_column': {self.image!r} of {place} holds {kind}; "
                "images are bytes, {bytes, path} or paths"
            )

    def _records(
        self, file: str, batches: Iterable[pyarrow.RecordBatch], first_row: int, num_rows: int | None, opened: Any
    ) -> Iterator[Record | Broken]:
        """Yield rows as records; where the file is damaged, one ``Broken`` per lost row.

        Args:
            file: relative path of the file.
            batches: rows from ``first_row`` on.
            first_row: number of the first row within the file.
            num_rows: expected rows; None if unknown.
            opened: the file that ``batches`` reads.

        Raises:
            UserError: the connection broke.
        """
        import pyarrow

        row = first_row
        try:
            for batch in batches:
                for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                    for values in batch.slice(start, _ROWS_AT_ONCE).select(self.columns).to_pylist():
                        yield self.record(values, f"{file}:{row}")
                        row += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            _raise_failure(opened)
            for lost in range(row, row + 1 if num_rows is None else first_row + num_rows):
                yield Broken(f"{file}:{lost}", "damaged table", " ".join(str(error).split()))


@SOURCES.register("parquet")
class Parquet(_ArrowSource):
    """Rows of Parquet files. A part is one row group, or several consecutive ones with 512 rows in total."""

    @cached_property
    def _names(self) -> list[str]:
        return self.files.ending(".parquet", ".parq")

    def _schema(self, opened: WatchedFile) -> pyarrow.Schema:
        return _parquet(opened).schema_arrow

    def _parts_of(self, file: str, opened: WatchedFile) -> list[Part]:
        footer = _parquet(opened).metadata
        parts, groups, first_row, num_rows = [], list[int](), 0, 0
        for group in range(footer.num_row_groups):
            groups.append(group)
            num_rows += footer.row_group(group).num_rows
            if num_rows >= BLOCK_SIZE or group == footer.num_row_groups - 1:
                where = {"file": file, "row_groups": groups, "first_row": first_row}
                fingerprint = f"{self.files.states[file]}; rows from {first_row}"
                parts.append(Part(f"{file}:{first_row}", fingerprint, num_rows, where))
                groups, first_row, num_rows = [], first_row + num_rows, 0
        return parts

    def read(self, part: Part) -> Iterator[Record | Broken]:
        """Yield the rows of the row groups."""
        file = part.where["file"]
        with self._open_whole(file) as opened:
            batches = _parquet(opened).iter_batches(_ROWS_AT_ONCE, part.where["row_groups"], columns=self.columns)
            yield from self._records(file, batches, part.where["first_row"], part.num_samples, opened)


def _parquet(opened: WatchedFile) -> pyarrow.parquet.ParquetFile:
    from pyarrow.parquet import ParquetFile

    opened.seek(0)
    return ParquetFile(opened)


@SOURCES.register("huggingface")
class HuggingFace(_ArrowSource):
    """Data sets saved by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``, and other folders of Arrow files.

    A part is a block of rows of one file. Behind a URL, where counting would fetch everything, it is a whole file.

    Args:
        split: of a ``DatasetDict``; null if there is only one.
    """

    def __init__(
        self,
        path: str,
        split: str | None = None,
        image_column: str = "image",
        caption_column: str | Sequence[str] | None = "caption",
        label_column: str | None = None,
        key_column: str | None = None,
        group_column: str | None = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        image_root: str | None = None,
    ) -> None:
        columns = (image_column, caption_column, label_column, key_column, group_column)
        super().__init__(path, *columns, num_classes, class_names, image_root)
        self.split = split

    @cached_property
    def _names(self) -> list[str]:
        """The files of the split, in the data set's order."""
        found = [name for name in self.files.ending(".arrow") if not name.rpartition("/")[2].startswith("cache-")]
        folder = ""
        if self.split is not None or "dataset_dict.json" in self.files.states:
            splits = sorted({name.partition("/")[0] for name in found if "/" in name})
            if self.split not in splits and not (self.split is None and len(splits) == 1):
                has = ", ".join(splits) or "none"
                raise UserError(f"key '{PARAMS}.split': {self.files.shown()} has the splits {has}; name one")
            folder = f"{self.split or splits[0]}/"
        if f"{folder}state.json" not in self.files.states:
            return [name for name in found if name.startswith(folder)]
        # The list, because files of an earlier save may remain.
        state = json.loads(self.files.content(f"{folder}state.json"))
        return [f"{folder}{entry['filename']}" for entry in state["_data_files"]]

    def _open(self, file: str) -> Any:
        import pyarrow

        if file not in self.files.states:
            raise self.files.unreadable(FileNotFoundError(), file)
        return pyarrow.memory_map(self.files.inner_path(file)) if self.files.is_local else self.files.open(file)

    def _schema(self, opened: Any) -> pyarrow.Schema:
        return _reader(opened).schema

    def _parts_of(self, file: str, opened: Any) -> list[Part]:
        state = self.files.states[file]
        if not self.files.is_local:
            return [Part(file, state, None, {"file": file, "start": 0, "stop": None})]
        blocks = block_parts(sum(batch.num_rows for batch in _batches(opened)), state, prefix=file)
        return [replace(block, where={**block.where, "file": file}) for block in blocks]

    def read(self, part: Part) -> Iterator[Record | Broken]:
        """Yield the rows of the block."""
        file, start, stop = part.where["file"], part.where["start"], part.where["stop"]
        with self._open_whole(file) as opened:
            yield from self._records(file, _rows(opened, start, stop), start, part.num_samples, opened)


def _rows(opened: Any, start: int, stop: int | None) -> Iterator[pyarrow.RecordBatch]:
    """Yield rows ``start`` to ``stop`` - 1."""
    first = 0
    for batch in _batches(opened):
        if stop is not None and first >= stop:
            return
        end = batch.num_rows if stop is None else min(batch.num_rows, stop - first)
        skipped = max(0, start - first)
        if skipped < end:
            yield batch.slice(skipped, end - skipped)
        first += batch.num_rows


def _batches(opened: Any) -> Iterator[pyarrow.RecordBatch]:
    reader = _reader(opened)
    if not hasattr(reader, "get_batch"):
        return iter(reader)
    return (reader.get_batch(index) for index in range(reader.num_record_batches))


def _reader(opened: Any) -> Any:
    """Return a reader for the Arrow file format or, as written by ``datasets``, the stream format."""
    import pyarrow

    opened.seek(0)
    is_file = opened.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    opened.seek(0)
    return pyarrow.ipc.open_file(opened) if is_file else pyarrow.ipc.open_stream(opened)


def _raise_failure(opened: Any) -> None:
    """Raise the error of a broken connection; a memory map has none."""
    if isinstance(opened, WatchedFile):
        opened.raise_failure()
