"""A folder of images."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from io import StringIO
from posixpath import join, normpath, splitext
from typing import Any

from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.files import parse_json
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import BrokenSample, Part, Record, block_size_of
from ddm_lightning.prepare.sources.decode import LeastSize, caption_in, decode_reduced
from ddm_lightning.prepare.sources.urls import PARAMS, Files

_CAPTION_FILES = ("captions.jsonl", "metadata.jsonl", "captions.csv", "metadata.csv")
# Files that look like caption files, but are not read.
_UNREAD = re.compile(r"(captions|metadata)\.(json|parquet|tsv|xlsx)")
_TEXT_SUFFIXES = (".caption", ".txt")
_CAPTION = "caption"
# Key of the cells of a CSV row that no column names.
_REST = ""


@SOURCES.register("imagefolder")
class ImageFolder:
    """All images below a folder; the key of a sample is its path in the folder.

    The class is the first-level folder, numbered in alphabetical order. Captions come from ``captions.jsonl``,
    ``metadata.jsonl``, ``captions.csv`` or ``metadata.csv`` of any folder (its ``file_name`` is a path in that folder),
    or else from a text file of the image's name (``cat.txt`` or ``cat.caption`` for ``cat.jpg``). An image with neither
    has an empty caption.

    Args:
        path: the folder, local or a URL.
        caption_column: column of the caption file; null for no captions at all.
        labels: whether first-level folders are classes.
        follow_links: whether to follow links that lead out of the folder.
    """

    packages: tuple[str, ...] = ("pillow",)
    attribution = ""
    least_size: LeastSize | None = None

    def __init__(
        self, path: str, caption_column: str | None = _CAPTION, labels: bool = True, follow_links: bool = False
    ) -> None:
        self.files = Files(path, follow_links=follow_links)
        self.caption_column = caption_column
        self.labels = labels

    @cached_property
    def class_names(self) -> list[str]:
        """First-level folders with images."""
        if self.labels:
            return sorted({name.partition("/")[0] for name in self.files.images if "/" in name})

        return []

    @cached_property
    def num_classes(self) -> int:
        """Number of class folders, at least 1."""
        return max(1, len(self.class_names))

    def parts(self) -> list[Part]:
        """List blocks of images with the names of their files.

        The hash of a name decides whether it begins a block, so a new file changes only its own block.
        """
        blocks: list[list[str]] = []
        for name in self._names:
            if not blocks or self._begins_block(name):
                blocks.append([])

            blocks[-1].append(name)

        return [*map(self._part, blocks)]

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        # Everything comes from the part, so that no worker lists the folder again.
        self.num_classes = part.where["num_classes"]
        rows = part.where["images"]
        texts = self.files.contents([text for *_, text in rows if text])
        images = self.files.contents([name for name, *_ in rows])
        for (name, label, caption, text), data in zip(rows, images, strict=True):
            if text:
                caption = next(texts)

            caption = caption_in(caption, name)
            if label < 0:
                yield BrokenSample(
                    name, "outside the class folders", f"set {PARAMS}.labels=false if folders are not classes"
                )
                continue

            decoded = decode_reduced(data, name, self.least_size)
            if isinstance(decoded, BrokenSample):
                yield decoded
            elif isinstance(caption, BrokenSample):
                yield caption
            else:
                yield Record(name, caption=caption, label=label, **decoded)

    @cached_property
    def _names(self) -> list[str]:
        """Images in the folder, and those named only by a caption file."""
        names = sorted({*self.files.images, *self._captions})
        if not names:
            raise UserError(f"key '{PARAMS}.path': no image in {self.files.shown()}; change the path")

        return names

    @cached_property
    def _texts(self) -> dict[str, str]:
        """Text files by their names without the suffix, which may be in upper case; of several, the last one counts."""
        if self.caption_column is None:
            return {}

        return {splitext(name)[0]: name for name in self.files.states if name.lower().endswith(_TEXT_SUFFIXES)}

    @cached_property
    def _captions(self) -> dict[str, str]:
        """Captions in caption files, by name of the image."""
        captions = dict[str, str]()
        files = dict[str, str]()  # the caption file of each folder
        lacking = []  # files without the caption column, and the columns that they have
        existing = set[str]()
        if self.caption_column is None:
            return captions

        for file in self.files.states:
            folder, _, base = file.rpartition("/")
            if _UNREAD.fullmatch(base.lower()):
                note(f"{self.files.shown(file)}: is not read; captions may be in one of {', '.join(_CAPTION_FILES)}")
            if base.lower() not in _CAPTION_FILES:
                continue

            rows = self._rows(file)
            if rows is None:
                continue

            other = files.setdefault(folder, file)
            if other != file:
                raise UserError(f"{self.files.shown()}: has both {other} and {file}; keep one")

            columns = set[str]()
            for number, row in rows:
                columns |= self._add_caption(captions, file, number, row)

            if columns and self.caption_column not in columns:
                lacking.append(file)
                existing |= columns

        # A folder without caption files is fine, unless the user names a column of theirs.
        has_none = not captions and (files or self.caption_column != _CAPTION)
        if lacking or has_none:
            raise UserError(
                f"key '{PARAMS}.caption_column': the caption files in {self.files.shown()} "
                f"({', '.join(lacking or files.values()) or 'none'}) have no column {self.caption_column!r}; "
                f"they have: {', '.join(sorted(existing)) or 'none'}; or set it to null"
            )

        return captions

    def _add_caption(self, captions: dict[str, str], file: str, number: int, row: Any) -> set[str]:
        """Add the caption of one line, which is JSON or a row of CSV; return the line's columns."""
        try:
            if isinstance(row, bytes):
                row = parse_json(row)
            if isinstance(row.get(_REST), list):  # surplus cells of a CSV row
                raise ValueError("it has more cells than the first line: put text with commas in quotes")

            name = self._image_of(file.rpartition("/")[0], row["file_name"])
            caption = caption_in(row.get(self.caption_column), name)
            if name in captions or isinstance(caption, BrokenSample):
                raise ValueError(f"{self.caption_column!r} is not text, or 'file_name' is not unique")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.files.shown(file)}: line {number}: needs JSON with its own 'file_name' ({error!r}); "
                "fix the line"
            ) from None

        captions[name] = caption
        return set(row)

    def _rows(self, file: str) -> Iterable[tuple[int, Any]] | None:
        """Return number and content of each line of a caption file; None for a CSV file about something else."""
        content = self.files.content(file)
        if not file.lower().endswith(".csv"):
            return ((number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip())

        try:
            reader = csv.DictReader(StringIO(content.decode("utf-8-sig"), newline=""), restkey=_REST)
            reader.fieldnames = [*map(str.strip, reader.fieldnames or ())]
            rows = [(reader.line_num, row) for row in reader]
        except (UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{self.files.shown(file)}: is no CSV file in UTF-8 ({error}); save it as one") from None

        if "file_name" in reader.fieldnames:
            return rows

        if "file_name" in "".join(reader.fieldnames) or "captions" in file.lower():
            raise UserError(
                f"{self.files.shown(file)}: its first line {', '.join(reader.fieldnames)!r} has no column file_name; "
                "separate columns by commas"
            )

        return None

    def _image_of(self, folder: str, given: str) -> str:
        """Return the image that a caption file in ``folder`` calls ``given``, perhaps with Windows' backslashes."""
        joined = join(folder, given)
        name = normpath(joined)
        of_windows = normpath(joined.replace("\\", "/"))
        if name not in self.files.states and of_windows in self.files.states:
            name = of_windows
        if name.startswith(("../", "/")):
            raise ValueError("it leads out of the folder")

        return name

    def _part(self, names: list[str]) -> Part:
        """Return a block with the label and caption of each image, and a hash of all that they are read from."""
        states = self.files.states
        digest = hashlib.sha256()
        images = []
        classes = {folder: number for number, folder in enumerate(self.class_names)}
        for name in names:
            caption = self._captions.get(name)
            text = self._texts.get(splitext(name)[0]) or self._texts.get(name)  # cat.txt, or cat.jpg.txt
            state_of_text = states.get(text or "")
            if name in self._captions:
                text = None

            folder, mark, _ = name.partition("/")
            label = 0
            if classes:
                label = classes.get(folder if mark else "", -1)

            images.append([name, label, caption, text])
            # True stands for a caption in a text file.
            facts = (name, label, bool(text) or caption, states.get(name), state_of_text)
            digest.update(json.dumps(facts).encode())

        # A block is named after the image that begins it; the first block may begin with any image.
        block = "block-first"
        if self._begins_block(names[0]):
            block = f"block-{_hash(names[0])}"

        return Part(block, digest.hexdigest(), len(names), {"images": images, "num_classes": self.num_classes})

    def _begins_block(self, name: str) -> bool:
        return int(_hash(name), 16) % block_size_of(len(self._names)) == 0


def _hash(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
