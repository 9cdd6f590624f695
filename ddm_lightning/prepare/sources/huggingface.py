"""Data sets that Hugging Face's ``datasets`` saved, and other Arrow files, read without that package."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES, require
from ddm_lightning.prepare.records import Broken, Part, Record
from ddm_lightning.prepare.sources.arrow import check_schema, labels_of, records
from ddm_lightning.prepare.sources.columns import Columns, Labels
from ddm_lightning.prepare.sources.urls import Files, WatchedFile, block_parts, is_absolute, read_anywhere

if TYPE_CHECKING:
    import pyarrow

_FILE_FORMAT = b"ARROW1"


@SOURCES.register("huggingface")
class HuggingFace:
    """What ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote; the key is ``<file>:<row>``.

    A part is a block of rows of one file; behind a URL, where counting would fetch all of it, a whole file.

    Args:
        path: the saved folder, or any folder of Arrow files.
        split: of a ``DatasetDict``; null where there is only one.
        image_column: an ``Image`` column, or any that holds pictures as bytes or paths.
        caption_column: text, or a list of texts of which the first counts; of several columns the first that is not
            empty; null for none.
        label_column: class; null for none.
        key_column: unique name of a sample; null for its place.
        group_column: what is held out together; null for none.
        num_classes: labels are numbers below it; a ``ClassLabel`` column needs neither this nor ``class_names``.
        class_names: labels are these words, numbered from 0.
    """

    packages: tuple[str, ...] = ("pillow", "pyarrow")
    attribution = ""

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
    ) -> None:
        require("source 'huggingface'", "pyarrow", extra="arrow")
        self.columns = Columns(image_column, caption_column, label_column, key_column, group_column)
        self._classes = (label_column, num_classes, class_names)
        self.split = split
        self.files = Files(path)

    @property
    def num_classes(self) -> int:
        """Classes, as the data set or the params say."""
        return self._labels.num_classes

    @property
    def class_names(self) -> list[str]:
        """Their names; empty if unknown."""
        return self._labels.class_names

    def parts(self) -> list[Part]:
        """Blocks of rows.

        Raises:
            UserError: no such split, a damaged file, or one that lacks a column.
        """
        return self._parts

    def read(self, part: Part) -> Iterator[Record | Broken]:
        """Rows of the block."""
        file, start, stop = part.where["file"], part.where["start"], part.where["stop"]
        labels = self._labels  # which opens a file
        with self._open(file) as source:
            batches = _rows(source, start, stop)
            yield from records(
                batches, start, part.num_samples, file, self.columns, labels, self._fetch, _failure_of(source)
            )

    @cached_property
    def _arrow_files(self) -> list[str]:
        """The files of the split, in the data set's order."""
        found = [name for name in self.files.ending(".arrow") if not name.rpartition("/")[2].startswith("cache-")]
        if self.split is None and "dataset_dict.json" not in self.files.states:
            folder = ""
        else:
            splits = sorted({name.partition("/")[0] for name in found if "/" in name})
            if self.split not in splits and not (self.split is None and len(splits) == 1):
                raise UserError(
                    f"key 'prepare.source.params.split': {self.files.shown()} has the splits "
                    f"{', '.join(splits) or 'none'}; name one"
                )
            folder = f"{self.split or splits[0]}/"
        if f"{folder}state.json" not in self.files.states:
            return [name for name in found if name.startswith(folder)]
        # Beside what was saved, files of an earlier save may lie.
        state = json.loads(self.files.content(f"{folder}state.json"))
        return [f"{folder}{entry['filename']}" for entry in state["_data_files"]]

    @cached_property
    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        for file in self._arrow_files:
            if file not in self.files.states:
                raise self.files.unreadable(FileNotFoundError(), file)
            check_schema(self._schema(file), self.columns, self.files.shown(file))
            state = self.files.states[file]
            if not self.files.is_local:
                parts.append(Part(file, state, None, {"file": file, "start": 0, "stop": None}))
                continue
            blocks = block_parts(self._count(file), state, prefix=file)
            parts += [replace(block, where={**block.where, "file": file}) for block in blocks]
        return parts

    @cached_property
    def _labels(self) -> Labels:
        return labels_of(self._schema(self._arrow_files[0]), *self._classes)

    def _schema(self, file: str) -> pyarrow.Schema:
        import pyarrow

        with self._open(file) as source:
            try:
                return _reader(source).schema
            except (pyarrow.ArrowException, OSError) as error:
                _failure_of(source)()
                raise self._damaged(error, file) from error

    def _count(self, file: str) -> int:
        import pyarrow

        with self._open(file) as source:
            try:
                return sum(batch.num_rows for batch in _batches(source))
            except (pyarrow.ArrowException, OSError) as error:
                _failure_of(source)()
                raise self._damaged(error, file) from error

    def _open(self, file: str) -> Any:
        import pyarrow

        if not self.files.is_local:
            return self.files.open(file)
        try:
            return pyarrow.memory_map(self.files.inner_path(file))
        except (pyarrow.ArrowException, OSError) as error:  # an empty file cannot be mapped
            raise self._damaged(error, file) from error

    def _damaged(self, error: Exception, file: str) -> UserError:
        problem = " ".join(str(error).split())
        return UserError(f"{self.files.shown(file)} is no whole Arrow file: {problem}; save the data set again")

    def _fetch(self, path: str) -> bytes:
        return read_anywhere(path) if is_absolute(path) else self.files.content(path)


def _reader(source: Any) -> Any:
    """A reader of the format that the first bytes tell: a file's, or a stream's, which ``datasets`` writes."""
    import pyarrow

    is_file = source.read(len(_FILE_FORMAT)) == _FILE_FORMAT
    source.seek(0)
    return pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)


def _rows(source: Any, start: int, stop: int | None) -> Iterator[pyarrow.RecordBatch]:
    """Rows ``start`` to ``stop`` - 1."""
    first = 0
    for batch in _batches(source):
        if stop is not None and first >= stop:
            return
        behind = batch.num_rows if stop is None else min(batch.num_rows, stop - first)
        skipped = max(0, start - first)
        if skipped < behind:
            yield batch.slice(skipped, behind - skipped)
        first += batch.num_rows


def _failure_of(source: Any) -> Callable[[], None]:
    """What raises the network's error; a memory map has none."""
    return source.raise_failure if isinstance(source, WatchedFile) else lambda: None


def _batches(source: Any) -> Iterator[pyarrow.RecordBatch]:
    reader = _reader(source)
    if not hasattr(reader, "get_batch"):
        return iter(reader)
    return (reader.get_batch(index) for index in range(reader.num_record_batches))
