"""Which columns of a table are the picture, its caption and so on, and how a row becomes a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from PIL import Image

from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.records import Broken, Record
from ddm_lightning.prepare.sources.decode import decode, rgb

PARAMS = "prepare.source.params"


class Labels:
    """Classes in a column: numbers below ``num_classes``, or ``class_names`` numbered from 0; no column, one class."""

    def __init__(self, column: str | None, num_classes: int | None, class_names: Sequence[str] | None) -> None:
        if column is None and not (num_classes is None and class_names is None):
            raise ValueError("num_classes and class_names need a label_column")
        if column is not None and (num_classes is None) == (class_names is None):
            raise ValueError("label_column needs either num_classes or class_names")
        if (num_classes is not None and num_classes < 1) or (class_names is not None and not class_names):
            raise ValueError("there has to be at least one class")
        self.column = column
        self.num_classes = 1 if column is None else num_classes or len(class_names or ())
        self.class_names = [str(name) for name in class_names or ()]
        self._numbers = {name: number for number, name in enumerate(self.class_names)}

    def number(self, value: Any, key: str) -> int | Broken:
        """The class of a cell, which may be a number, a word, or either of them as text."""
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
        is_one = 0 <= number < self.num_classes and number == float(value)
        return number if is_one else Broken(key, "unknown class", f"{value}, of {self.num_classes} classes")


class Columns:
    """The columns that a table-like source was told to use.

    Args:
        image: pictures as bytes, as ``{bytes, path}``, or as paths.
        caption: text, or a list of texts of which the first counts; of several columns the first that is not empty
            counts. None for no captions.
        key: unique name of a sample; None for its place in its file.
        group: what is held out together.
    """

    def __init__(
        self, image: str, caption: str | Sequence[str] | None, label: str | None, key: str | None, group: str | None
    ) -> None:
        captions = [caption] if isinstance(caption, str) else list(caption or ())
        if not all(isinstance(name, str) for name in captions):
            raise ValueError("caption_column has to be a name, a list of names or null")
        self.image, self.captions, self.label, self.key, self.group = image, captions, label, key, group

    @property
    def names(self) -> list[str]:
        """All columns in use, each once."""
        named = [self.image, *self.captions, self.label, self.key, self.group]
        return list(dict.fromkeys(name for name in named if name is not None))

    def check(self, there: Iterable[str], place: str) -> None:
        """Refuse a table that lacks one of the columns.

        Raises:
            UserError: naming the param, ``place`` and the columns that are there.
        """
        columns = list(there)
        roles = [("image_column", self.image), *(("caption_column", name) for name in self.captions)]
        roles += [(f"{role}_column", name) for role in ("label", "key", "group") if (name := getattr(self, role))]
        for role, name in roles:
            if name not in columns:
                raise UserError(
                    f"key '{PARAMS}.{role}': {place} has no column {name!r}; it has: {', '.join(columns) or 'none'}"
                )

    def record(
        self, row: Mapping[str, Any], place: str, labels: Labels, fetch: Callable[[str], bytes]
    ) -> Record | Broken:
        """A row as a record.

        Args:
            place: the row's key if no column holds it.
            fetch: gives what the file at a path holds, or raises.
        """
        key = place
        if self.key is not None:
            if row[self.key] is None:
                return Broken(place, "no key")
            key = str(row[self.key])
        if self.group is not None and row[self.group] is None:
            return Broken(key, "no group")
        data = _picture(row[self.image], key, fetch)
        if isinstance(data, Broken):
            return data
        caption = next((row[name] for name in self.captions if row[name]), None)
        label = None if self.label is None else row[self.label]
        return record(key, data, caption, labels, label, None if self.group is None else row[self.group])


def record(
    key: str, data: bytes | Image.Image, caption: Any, labels: Labels, label: Any, group: Any
) -> Record | Broken:
    """A sample's cells as a record; ``data`` is the picture, encoded or not."""
    text, number = caption_in(caption, key), labels.number(label, key)
    if isinstance(number, Broken):
        return number
    image = decode(data, key) if isinstance(data, bytes) else rgb(data, key)
    if isinstance(image, Broken):
        return image
    return Record(key, image, text, number, None if group is None else _word(group))


def _picture(cell: Any, key: str, fetch: Callable[[str], bytes]) -> bytes | Image.Image | Broken:
    if isinstance(cell, Mapping):
        cell = cell.get("path") if cell.get("bytes") is None else cell["bytes"]
    if isinstance(cell, str):
        try:
            return fetch(cell)
        except FileNotFoundError:
            return Broken(key, "missing file", cell)
        except Exception as error:  # noqa: BLE001  every back end raises its own
            return Broken(key, "unreadable file", " ".join(f"{cell}: {type(error).__name__}: {error}".split()))
    return (
        cell
        if isinstance(cell, (bytes, Image.Image, Broken))
        else Broken(key, "no picture", f"a {type(cell).__name__}")
    )


def _word(value: Any) -> str:
    return value.decode(errors="replace").strip() if isinstance(value, bytes) else str(value)


def caption_of(data: bytes, key: str) -> str | Broken:
    """The caption in a UTF-8 file, without a byte-order mark and without white space around it."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        return Broken(key, "caption is no UTF-8", str(error))


def caption_in(value: Any, key: str) -> str | Broken:
    """The caption in a cell: text as it is, the first of a list, nothing for null."""
    if isinstance(value, list):
        value = value[0] if value else None
    if value is None:
        return ""
    if isinstance(value, bytes):
        return caption_of(value, key)
    return value if isinstance(value, str) else Broken(key, "caption is no text", f"a {type(value).__name__}")
