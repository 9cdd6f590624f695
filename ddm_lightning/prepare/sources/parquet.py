"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES, require
from ddm_lightning.prepare.records import Broken, Part, Record
from ddm_lightning.prepare.sources.arrow import ROWS_AT_ONCE, check_schema, labels_of, records
from ddm_lightning.prepare.sources.columns import Columns, Labels
from ddm_lightning.prepare.sources.urls import BLOCK_SIZE, Files, WatchedFile, is_absolute, read_anywhere

if TYPE_CHECKING:
    import pyarrow.parquet


@SOURCES.register("parquet")
class Parquet:
    """Rows of Parquet files; the key is ``<file>:<row>`` or what ``key_column`` says.

    A part is a row group, or as many in succession as give 512 rows.

    Args:
        path: a folder, one file, or a pattern such as ``hf://datasets/name/data/train-*.parquet``.
        image_column: pictures as bytes, as Hugging Face's ``{bytes, path}``, or as paths and URLs.
        caption_column: text, or a list of texts of which the first counts; of several columns the first that is not
            empty; null for none.
        label_column: class; null for none.
        key_column: unique name of a sample; null for its place.
        group_column: what is held out together; null for none.
        num_classes: labels are numbers below it; where Hugging Face wrote the names of the classes, these count.
        class_names: labels are these words, numbered from 0.
        image_root: folder or URL that paths are relative to; null for that of the files.
    """

    packages: tuple[str, ...] = ("pillow", "pyarrow")
    attribution = ""

    def __init__(
        self,
        path: str,
        image_column: str = "image",
        caption_column: str | Sequence[str] | None = "caption",
        label_column: str | None = None,
        key_column: str | None = None,
        group_column: str | None = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
        image_root: str | None = None,
    ) -> None:
        require("source 'parquet'", "pyarrow", extra="arrow")
        self.columns = Columns(image_column, caption_column, label_column, key_column, group_column)
        self._classes = (label_column, num_classes, class_names)
        self.image_root = image_root
        self.files = Files(path)

    @property
    def num_classes(self) -> int:
        """Classes, as the files or the params say."""
        return self._labels.num_classes

    @property
    def class_names(self) -> list[str]:
        """Their names; empty if unknown."""
        return self._labels.class_names

    def parts(self) -> list[Part]:
        """Row groups; reads the footer of every file.

        Raises:
            UserError: no file, a damaged one, or one that lacks a column.
        """
        return self._parts

    def read(self, part: Part) -> Iterator[Record | Broken]:
        """Rows of the row groups."""
        file = part.where["file"]
        with self.files.open(file) as opened:
            table = self._table(opened, file)
            batches = table.iter_batches(ROWS_AT_ONCE, row_groups=part.where["row_groups"], columns=self.columns.names)
            yield from records(
                batches,
                part.where["first_row"],
                part.num_samples,
                file,
                self.columns,
                self._labels,
                self._fetch,
                opened.raise_failure,
            )

    @cached_property
    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        for file in self.files.ending(".parquet", ".parq"):
            with self.files.open(file) as opened:
                table = self._table(opened, file)
                check_schema(table.schema_arrow, self.columns, self.files.shown(file))
                sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
            parts += _row_groups(file, sizes, self.files.states[file])
        return parts

    @cached_property
    def _labels(self) -> Labels:
        first = self.files.ending(".parquet", ".parq")[0]
        with self.files.open(first) as opened:
            return labels_of(self._table(opened, first).schema_arrow, *self._classes)

    def _table(self, opened: WatchedFile, file: str) -> pyarrow.parquet.ParquetFile:
        import pyarrow
        from pyarrow.parquet import ParquetFile

        try:
            return ParquetFile(opened)
        except (pyarrow.ArrowException, OSError) as error:
            opened.raise_failure()
            problem = " ".join(str(error).split())
            raise UserError(f"{self.files.shown(file)} is no whole Parquet file: {problem}; fetch it again") from error

    def _fetch(self, path: str) -> bytes:
        if is_absolute(path):
            return read_anywhere(path)
        root = self.image_root
        return read_anywhere(f"{root.rstrip('/')}/{path}") if root else self.files.content(path)


def _row_groups(file: str, sizes: list[int], state: str) -> list[Part]:
    """Parts of one file, whose row groups have ``sizes`` rows."""
    parts, groups, first_row, num_rows = [], list[int](), 0, 0
    for group, size in enumerate(sizes):
        groups.append(group)
        num_rows += size
        if num_rows >= BLOCK_SIZE or group == len(sizes) - 1:
            where = {"file": file, "row_groups": groups, "first_row": first_row}
            parts.append(Part(f"{file}:{first_row}", f"{state}; rows from {first_row}", num_rows, where))
            groups, first_row, num_rows = [], first_row + num_rows, 0
    return parts
