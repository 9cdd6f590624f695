"""Rows of a table as records: the base of table sources, and functions for cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from PIL import Image

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import require
from ddm_lightning.prepare.records import Broken, Record
from ddm_lightning.prepare.sources.decode import decode, one_line, rgb
from ddm_lightning.prepare.sources.urls import Files, is_absolute, read_anywhere

PARAMS = "prepare.source.params"


class Labels:
    """Classes of a column: numbers below ``num_classes``, or ``class_names`` numbered from 0. No column: one class."""

    def __init__(self, column: str | None, num_classes: int | None, class_names: Sequence[str] | None) -> None:
        if column is None and not (num_classes is None and class_names is None):
            raise ValueError("num_classes and class_names need a label_column")
        if column is not None and (num_classes is None) == (class_names is None):
            raise ValueError("label_column needs either num_classes or class_names")
        if (num_classes is not None and num_classes < 1) or (class_names is not None and not class_names):
            raise ValueError("there must be at least one class")
        self.column = column
        self.num_classes = 1 if column is None else num_classes or len(class_names or ())
        self.class_names = [str(name) for name in class_names or ()]
        self._numbers = {name: number for number, name in enumerate(self.class_names)}

    def number(self, value: Any, key: str) -> int | Broken:
        """Return the class of a cell: a number, a class name, or either of them as text or bytes."""
        if self.column is None:
            return 0
        if isinstance(value, bytes):
            value = value.decode(errors="replace").strip()
        if value is None:
            return Broken(key, "no label")
        if isinstance(value, str) and value in self._numbers:
            return self._numbers[value]
        try:
            number = int(value)
        except (TypeError, ValueError):
            return Broken(key, "unknown class", repr(value)[:80])
        is_class = 0 <= number < self.num_classes and number == float(value)
        return number if is_class else Broken(key, "unknown class", f"{value}, of {self.num_classes} classes")


class TableSource:
    """Base of sources whose samples are rows of a table.

    Args:
        path: a folder, one file, or a pattern such as ``hf://datasets/name/data/train-*.parquet``; local or a URL.
        image_column: encoded images as bytes, as Hugging Face's ``{bytes, path}``, or as paths and URLs.
        caption_column: text, or a list of texts whose first entry is used. Of several columns the first non-empty
            one is used. Null for none.
        label_column: class; null for none.
        key_column: unique name of a sample; null for ``<file>:<row>``.
        group_column: samples of one group are held out together; null for none.
        num_classes: labels are numbers below it.
        class_names: labels are these words, numbered from 0. A Hugging Face ``ClassLabel`` column needs neither.
        image_root: folder or URL for relative image paths; null for the folder of the files.
    """

    packages: tuple[str, ...] = ("pillow",)
    attribution = ""
    needs: tuple[str, ...] = ()
    """Packages of the extra ``arrow`` that must be installed."""

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
        require(f"source {type(self).__name__.lower()!r}", *self.needs, extra="arrow")
        self.captions = [caption_column] if isinstance(caption_column, str) else list(caption_column or ())
        if not all(isinstance(name, str) for name in self.captions):
            raise ValueError("caption_column must be a name, a list of names or null")
        self.image, self.label, self.key, self.group = image_column, label_column, key_column, group_column
        self.image_root = image_root
        if label_column is None or num_classes is not None or class_names is not None:
            self.labels = Labels(label_column, num_classes, class_names)
        self.files = Files(path)

    @property
    def num_classes(self) -> int:
        """Number of classes, from the params or the files."""
        return self.labels.num_classes

    @property
    def class_names(self) -> list[str]:
        """Names of the classes; empty if unknown."""
        return self.labels.class_names

    @cached_property
    def labels(self) -> Labels:
        """The classes. Unless the params give them, they come from the files."""
        names = self.stored_class_names()
        if names is None:
            raise UserError(
                f"key '{PARAMS}.label_column': the files do not name the classes; add num_classes or class_names"
            )
        return Labels(self.label, None, names)

    def stored_class_names(self) -> list[str] | None:
        """Names of the classes in the files; None if the files do not name them."""
        return None

    @property
    def columns(self) -> list[str]:
        """All columns in use, each once."""
        return list(dict.fromkeys(name for _, name in self.roles()))

    def check_columns(self, existing: Iterable[str], place: str) -> None:
        """Refuse a table without one of the columns.

        Raises:
            UserError: a column is missing; names the param, ``place`` and the existing columns.
        """
        existing = list(existing)
        for role, name in self.roles():
            if name not in existing:
                has = ", ".join(existing) or "none"
                raise UserError(f"key '{PARAMS}.{role}_column': {place} has no column {name!r}; it has: {has}")

    def record(self, row: Mapping[str, Any], place: str) -> Record | Broken:
        """Return a row as a record; ``place`` is its key if there is no key column."""
        key = place
        if self.key is not None:
            if row[self.key] is None:
                return Broken(place, "no key")
            key = str(row[self.key])
        if self.group is not None and row[self.group] is None:
            return Broken(key, "no group")
        image = _image(row[self.image], key, self._fetch)
        if isinstance(image, Broken):
            return image
        label = self.labels.number(None if self.label is None else row[self.label], key)
        if isinstance(label, Broken):
            return label
        pixels = decode(image, key) if isinstance(image, bytes) else rgb(image, key)
        if isinstance(pixels, Broken):
            return pixels
        caption = next((row[name] for name in self.captions if row[name]), None)
        group = None if self.group is None else row[self.group]
        if isinstance(group, bytes):
            group = group.decode(errors="replace").strip()
        return Record(key, pixels, caption_in(caption, key), label, None if group is None else str(group))

    def roles(self) -> list[tuple[str, str]]:
        """Pair each column in use with its role: image, caption, label, key or group."""
        roles = [("image", self.image), *(("caption", name) for name in self.captions)]
        others = {"label": self.label, "key": self.key, "group": self.group}
        return roles + [(role, name) for role, name in others.items() if name is not None]

    def _fetch(self, path: str) -> bytes:
        if is_absolute(path):
            return read_anywhere(path)
        return read_anywhere(f"{self.image_root.rstrip('/')}/{path}") if self.image_root else self.files.content(path)


def _image(cell: Any, key: str, fetch: Callable[[str], bytes]) -> bytes | Image.Image | Broken:
    """Return the image of a cell, encoded or not; ``fetch`` reads the file at a path."""
    if isinstance(cell, Mapping):
        cell = cell.get("path") if cell.get("bytes") is None else cell["bytes"]
    if isinstance(cell, str):
        try:
            return fetch(cell)
        except Exception as error:  # noqa: BLE001  each fsspec back end raises its own errors
            return unread(error, key, cell)
    return cell if isinstance(cell, (bytes, Image.Image)) else Broken(key, "no image", f"a {type(cell).__name__}")


def unread(error: Exception, key: str, path: str = "") -> Broken:
    """Return the broken sample for a file that could not be read."""
    if isinstance(error, FileNotFoundError):
        return Broken(key, "missing file", path or one_line(error))
    return Broken(key, "unreadable file", f"{path}: {one_line(error)}" if path else one_line(error))


def caption_of(data: bytes, key: str) -> str | Broken:
    """Decode a UTF-8 caption; strip a byte-order mark and white space."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        return Broken(key, "caption is not UTF-8", str(error))


def caption_in(value: Any, key: str) -> str | Broken:
    """Return the caption of a cell: its text, the first entry of a list, or the empty string for null."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, bytes):
        return caption_of(value, key)
    if value is None or isinstance(value, str):
        return value or ""
    return Broken(key, "caption is not text", f"a {type(value).__name__}")
