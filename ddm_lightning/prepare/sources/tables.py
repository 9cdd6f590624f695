"""Sources whose samples are rows of a table: the base class, Parquet, and Hugging Face's ``datasets``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from math import isnan
from posixpath import basename
from typing import TYPE_CHECKING, Any, ClassVar

from PIL import Image

from ddm_lightning.core.checks import option
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import parse_json
from ddm_lightning.core.registry import SOURCES, require
from ddm_lightning.prepare.filters import CAPTIONS_KEY, number_in
from ddm_lightning.prepare.records import BrokenSample, Part, Record, block_size_of
from ddm_lightning.prepare.sources.decode import caption_in, decode_reduced, one_line
from ddm_lightning.prepare.sources.urls import PARAMS, Files, content_or_error

if TYPE_CHECKING:
    import pyarrow

CAPTION_KEY = f"{PARAMS}.caption_column"
_ROWS_AT_ONCE = 32  # rows that are Python objects at a time: images of some megabytes must not pile up
_FILES_AT_ONCE = 16  # a table of contents at a URL takes some round trips
_FILE_FORMAT = b"ARROW1"
_UNCHAINED = re.compile("(https?|s3|sftp|ssh):")  # "::" in such a URL is no chain of file systems


@dataclass(eq=False)
class TableSource:
    """Base of sources whose samples are rows of a table.

    Args:
        path: a folder, one file, or a pattern such as ``hf://datasets/name/data/train-*.parquet``; local or a URL.
        image_column: encoded images as bytes, as Hugging Face's ``{bytes, path}``, or as paths and URLs.
        caption_column: text, or a list of texts of which the first is used. Of several columns the first non-empty
            one is used. Null for none.
        label_column: class; null for none.
        key_column: unique name of a sample; null for ``<file>:<row>``.
        group_column: samples of one group are held out together; null for none.
        num_classes: labels are numbers below it.
        class_names: labels are these words or numbers; with words alone also their numbers, from 0. A Hugging Face
            ``ClassLabel`` column needs neither.
        image_root: folder or URL for relative image paths; null for the folder of the files. Local paths that lead out
            of it are refused.
        follow_links: whether to follow links that lead out of the folder.
    """

    path: str
    image_column: str = "image"
    caption_column: str | list[str] | None = "caption"
    label_column: str | None = None
    key_column: str | None = None
    group_column: str | None = None
    num_classes: int | None = option(None, low=1)
    class_names: list[str] | None = None
    image_root: str | None = None
    follow_links: bool = False

    packages: ClassVar[tuple[str, ...]] = ("pillow",)
    attribution: ClassVar[str] = ""
    least_size: ClassVar[Any] = None
    """A ``LeastSize``, set by ``prepare``."""

    def __post_init__(self) -> None:
        self.extra_columns: dict[str, str] = {}
        if not all(isinstance(name, str) for name in self.captions):
            raise ValueError("caption_column must be a name, a list of names or null")

        self.files = self._images = Files(self.path, follow_links=self.follow_links)
        if self.image_root is not None and not self.image_root.startswith("http"):
            self._images = Files(self.image_root, f"key '{PARAMS}.image_root'", self.follow_links)

        self._find_classes()

    def _find_classes(self) -> None:
        """Complete ``num_classes`` and ``class_names`` from each other, or from the files."""
        given = [value for value in (self.class_names, self.num_classes) if value is not None]
        if len(given) > 1 or (given and self.label_column is None):
            raise ValueError("give one of num_classes and class_names, and only with a label_column")

        # If all names are words, a number in a cell is the label itself.
        self._takes_numbers = all(map(isnan, map(number_in, self.class_names or ())))
        if self.label_column is None:
            self.num_classes = 1
        elif self.num_classes is None:
            if self.class_names is None:
                self.class_names = self.stored_class_names()

            if not self.class_names:
                raise UserError(
                    f"key '{PARAMS}.label_column': the files do not name the classes; add num_classes or class_names"
                )

            self.num_classes = len(self.class_names)

        self.class_names = [*map(str, self.class_names or ())]
        self._number_of = {name: number for number, name in enumerate(self.class_names)}
        if len(self._number_of) < len(self.class_names):
            raise ValueError("class_names has a name twice")

    def stored_class_names(self) -> list[str] | None:
        """Names of the classes in the files; None if the files do not name them."""
        return None

    @property
    def captions(self) -> list[str]:
        """Columns of which the first non-empty one is the caption; none if ``prepare.captions`` replaces them."""
        if CAPTIONS_KEY in self.extra_columns.values():
            return []
        if isinstance(self.caption_column, str):
            return [self.caption_column]

        return list(self.caption_column or ())

    @property
    def roles(self) -> list[tuple[str, str]]:
        """Pairs of key and column, for each column in use."""
        roles = [(CAPTION_KEY, column) for column in self.captions]
        for name in ("image_column", "label_column", "key_column", "group_column"):
            column = getattr(self, name)
            if column is not None:
                roles.append((f"{PARAMS}.{name}", column))
        for column, key in self.extra_columns.items():
            roles.append((key, column))

        return roles

    @property
    def columns(self) -> list[str]:
        """All columns in use, each once."""
        return list(dict.fromkeys(column for _, column in self.roles))

    def check_columns(self, existing: Collection[str], place: str) -> None:
        """Refuse a table without one of the columns.

        Raises:
            UserError: a column is missing; names the key, ``place`` and the existing columns.
        """
        for key, column in self.roles:
            if column not in existing:
                raise UserError(
                    f"key {key!r}: {place} has no column {column!r}; it has: {', '.join(existing) or 'none'}"
                )

    def record(self, row: Mapping[Any, Any], place: str) -> Record | BrokenSample:
        """Return a row as a record; ``place`` is its key if there is no key column."""
        key: str | None = place
        if self.key_column is not None:
            key = _text(row[self.key_column])
        if key is None:
            return BrokenSample(place, "no key")

        group = None
        if self.group_column is not None:
            group = _text(row[self.group_column])
            if group is None:
                return BrokenSample(key, "no group")

        decoded = self._image(row[self.image_column], key)
        label: Any = 0
        if self.label_column is not None:
            label = self._label(row[self.label_column], key)

        caption: Any = ""
        for name in self.captions:
            caption = caption or caption_in(row[name], key)

        for found in (decoded, label, caption):
            if isinstance(found, BrokenSample):
                return found

        values = {name: row[name] for name in self.extra_columns}
        return Record(key, caption=caption, label=label, group=group, values=values, **decoded)

    def _label(self, value: Any, key: str) -> int | BrokenSample:
        """Return the class of a cell: a number, a class name, or either of them as text or bytes."""
        if value is None:
            return BrokenSample(key, "no label")
        if isinstance(value, bytes):
            value = _text(value)
        if isinstance(value, str) and value in self._number_of:
            return self._number_of[value]

        with suppress(TypeError, ValueError, OverflowError):
            number = int(value)
            label = number
            if not self._takes_numbers:
                label = self._number_of.get(str(number), -1)
            if 0 <= label < (self.num_classes or 1) and number == float(value):
                return label

        return BrokenSample(key, "unknown class", f"{repr(value)[:80]}, of {self.num_classes} classes")

    def _image(self, cell: Any, key: str) -> Any:
        """Return the ``Decoded`` image of a cell, ``BrokenSample`` if there is none."""
        if isinstance(cell, Mapping):
            content = cell.get("bytes")
            cell = cell.get("path") if content is None else content
        if isinstance(cell, str):
            cell = self._fetch(cell)
        if isinstance(cell, (bytes, Exception, Image.Image)):
            return decode_reduced(cell, key, self.least_size)

        return BrokenSample(key, "no image", f"a {type(cell).__name__}")

    def _fetch(self, path: str) -> bytes | Exception:
        """Read an image file, or return the error."""
        scheme, mark, inner = path.rpartition("::")[2].partition("://")  # of the last in a chain
        if _UNCHAINED.match(path) or (mark and scheme not in ("file", "local")):
            return content_or_error(path)

        root = self.image_root or ""
        if mark:
            path = inner
        if path.startswith("/") or not root.startswith("http"):
            return next(self._images.contents([path]))

        return content_or_error(f"{root.rstrip('/')}/{path}")  # perhaps a server that lists nothing


def _text(cell: Any) -> str | None:
    """Return a cell as text, with escaped bytes if it is binary; None for null."""
    if isinstance(cell, bytes):
        return cell.decode(errors="backslashreplace").strip()
    if cell is None:
        return None

    return str(cell)


@SOURCES.register("parquet")
class Parquet(TableSource):
    """Rows of Parquet files. A part is one row group, or consecutive ones that make a block together."""

    packages = ("pillow", "pyarrow")

    def __post_init__(self) -> None:
        require(f"source {type(self).__name__.lower()!r}", "pyarrow", extra="arrow")
        super().__post_init__()

    @cached_property
    def _names(self) -> list[str]:
        """Files of the data set."""
        return self.files.ending(".parquet", ".parq")

    def _file(self, name: str) -> Any:
        return self.files.open(name)

    def _reader(self, opened: Any) -> Any:
        """Return a reader with ``schema_arrow`` or ``schema``."""
        from pyarrow.parquet import ParquetFile

        return ParquetFile(opened)

    def _group_sizes(self, reader: Any) -> list[int] | None:
        """Count the rows of each group; a group can be read alone. None if counting would fetch everything."""
        return [reader.metadata.row_group(group).num_rows for group in range(reader.num_row_groups)]

    def _batches(self, reader: Any, groups: list[int] | None) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of some groups; None for all."""
        yield from reader.iter_batches(_ROWS_AT_ONCE, groups, columns=self.columns)

    def parts(self) -> list[Part]:
        """List blocks of rows; reads the table of contents of every file.

        Raises:
            UserError: no file, a damaged one, or one without a column.
        """
        parts: list[Part] = []
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            sizes_of = dict(zip(self._names, pool.map(self._checked_sizes, self._names), strict=True))

        block_size = block_size_of(sum(sum(sizes or []) for sizes in sizes_of.values()))
        for file, sizes in sizes_of.items():
            state = self.files.states[file]
            if sizes is None:
                parts.append(Part(file, state, None, {"file": file, "groups": None, "start": 0}))

            for groups, rows in _blocks(sizes or [], block_size):
                where = {"file": file, "groups": groups, "start": rows.start}
                parts.append(Part(f"{file}:{rows.start}", f"{state}; rows from {rows.start}", len(rows), where))

        return parts

    def _checked_sizes(self, file: str) -> list[int] | None:
        with self._open(file) as reader:
            self.check_columns(_schema(reader).names, self.files.shown(file))
            return self._group_sizes(reader)

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        """Yield the rows of a part; where the file is damaged, one ``BrokenSample`` per lost row.

        Raises:
            UserError: the connection broke.
        """
        import pyarrow

        file = part.where["file"]
        first_row = part.where["start"]
        row = first_row
        with self._open(file) as reader:
            try:
                for batch in self._batches(reader, part.where["groups"]):
                    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                        some = batch.slice(start, _ROWS_AT_ONCE).select(self.columns)
                        for values in some.to_pylist():
                            yield self.record(values, f"{file}:{row}")
                            row += 1
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                stop = row + 1
                if part.num_samples is not None:
                    stop = first_row + part.num_samples

                for lost in range(row, stop):
                    yield BrokenSample(f"{file}:{lost}", "damaged table", one_line(error))

    def stored_class_names(self) -> list[str] | None:
        """Names of a Hugging Face ``ClassLabel`` column."""
        with self._open(self._names[0]) as reader:
            metadata = _schema(reader).metadata or {}

        with suppress(KeyError, ValueError, TypeError):
            feature = parse_json(metadata[b"huggingface"])["info"]["features"][self.label_column]
            if feature["_type"] == "ClassLabel":
                return feature["names"]

        return None

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        """Open a file; any damage is a ``UserError``."""
        import pyarrow

        try:
            with self._file(file) as opened:
                yield self._reader(opened)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(
                f"{self.files.shown(file)} is not a whole table: {one_line(error)}; save it again"
            ) from error


def _blocks(sizes: list[int], block_size: int) -> Iterator[tuple[list[int], range]]:
    """Join consecutive groups of rows to blocks of about ``block_size``; yield the groups and the rows of each."""
    starts = list(accumulate(sizes, initial=0))
    for _, block in groupby(range(len(sizes)), lambda group: starts[group] // block_size):
        groups = list(block)
        yield groups, range(starts[groups[0]], starts[groups[-1] + 1])


def _schema(reader: Any) -> pyarrow.Schema:
    return getattr(reader, "schema_arrow", None) or reader.schema


@SOURCES.register("huggingface")
@dataclass(eq=False)
class HuggingFace(Parquet):
    """Data sets saved by ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk``, and other folders of Arrow files.

    A part is a block of rows of one file. Behind a URL, where counting would fetch everything, it is a whole file.

    Args:
        split: of a ``DatasetDict``; null if there is only one.
    """

    split: str | None = None

    @cached_property
    def _names(self) -> list[str]:
        """The files of the split, in the data set's order."""
        found = [name for name in self.files.ending(".arrow") if not basename(name).startswith("cache-")]
        folder = ""
        if self.split is not None or "dataset_dict.json" in self.files.states:
            splits = sorted({name.partition("/")[0] for name in found if "/" in name})
            if self.split not in splits and not (self.split is None and len(splits) == 1):
                raise UserError(
                    f"key '{PARAMS}.split': {self.files.shown()} has the splits {', '.join(splits) or 'none'}; name one"
                )

            folder = f"{self.split or splits[0]}/"

        if f"{folder}state.json" not in self.files.states:
            return [name for name in found if name.startswith(folder)]

        # The list, because files of an earlier save may remain.
        try:
            entries = parse_json(self.files.content(f"{folder}state.json"))["_data_files"]
            return [f"{folder}{entry['filename']}" for entry in entries]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.files.shown(f'{folder}state.json')} lists no Arrow files: {error!r}; save the data set again"
            ) from None

    def _file(self, name: str) -> Any:
        import pyarrow

        if not self.files.is_local:
            return self.files.open(name)

        with self.files.reading(name):
            return pyarrow.memory_map(self.files.inner_path(name))

    def _reader(self, opened: Any) -> Any:
        """Return a reader for the Arrow file format or, as written by ``datasets``, the stream format."""
        import pyarrow

        is_file = opened.read(len(_FILE_FORMAT)) == _FILE_FORMAT
        opened.seek(0)
        if is_file:
            return pyarrow.ipc.open_file(opened)

        return pyarrow.ipc.open_stream(opened)

    def _group_sizes(self, reader: Any) -> list[int] | None:
        if self.files.is_local:
            return [batch.num_rows for batch in _all_batches(reader)]

        return None

    def _batches(self, reader: Any, groups: list[int] | None) -> Iterator[pyarrow.RecordBatch]:
        for number, batch in enumerate(_all_batches(reader)):
            if groups is None or number in groups:
                yield batch


def _all_batches(reader: Any) -> Iterable[pyarrow.RecordBatch]:
    if not hasattr(reader, "get_batch"):  # a stream
        return iter(reader)

    return (reader.get_batch(index) for index in range(reader.num_record_batches))
