"""A folder of pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import PurePosixPath

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import Broken, Part, Record
from ddm_lightning.prepare.sources.columns import PARAMS, caption_in, caption_of
from ddm_lightning.prepare.sources.decode import decode
from ddm_lightning.prepare.sources.urls import BLOCK_SIZE, Files

_CAPTION_FILES = ("captions.jsonl", "metadata.jsonl")
# What lies beside pictures and is none. Anything else is taken for one, so that a picture of a kind that
# cannot be read is counted and not overlooked.
_NO_PICTURES = frozenset((".txt", ".json", ".jsonl", ".csv", ".tsv", ".md", ".parquet", ".html", ".py", ".zip", ".tar"))


@SOURCES.register("imagefolder")
class ImageFolder:
    """Every picture in a folder and the folders in it; the key is its path there.

    The class is the first-level folder, numbered in alphabetical order. The caption is, if ``captions.jsonl`` or
    ``metadata.jsonl`` lies at the top, what the line of the picture's ``file_name`` says there, and otherwise the text
    file of the same name (``cat.jpg``, ``cat.txt``); it is empty where there is none.

    Args:
        path: the folder, local or a URL.
        caption_column: of the JSONL file.
        labels: whether folders are classes; false when they are only there for order.
    """

    packages: tuple[str, ...] = ("pillow",)
    attribution = ""

    def __init__(self, path: str, caption_column: str = "caption", labels: bool = True) -> None:
        self.files = Files(path)
        self.caption_column, self.labels = caption_column, labels

    @cached_property
    def class_names(self) -> list[str]:
        """The first-level folders that hold pictures."""
        return sorted({name.partition("/")[0] for name in self._pictures if "/" in name}) if self.labels else []

    @cached_property
    def num_classes(self) -> int:
        """Folders, at least 1."""
        return max(1, len(self.class_names))

    def parts(self) -> list[Part]:
        """Blocks of pictures, which name what they read.

        The hash of a name says whether it begins a block, so a new file changes no block but its own.
        """
        names = self._names
        starts = [0, *(index for index, name in enumerate(names) if index and _begins_block(name)), len(names)]
        return [self._part(names[start:stop]) for start, stop in pairwise(starts)]

    def read(self, part: Part) -> Iterator[Record | Broken]:
        """Pictures of the block."""
        # So that no worker has to list the folder again.
        self.num_classes = part.where["num_classes"]
        names, labels, captions = part.where["files"], part.where["labels"], part.where["captions"]
        texts = self.files.contents(
            [_text_file(name) for name, found in zip(names, captions, strict=True) if found is True]
        )
        for name, label, found, data in zip(names, labels, captions, self.files.contents(names), strict=True):
            caption = _read_caption(next(texts), name) if found is True else found or ""
            if label < 0:
                yield Broken(name, "outside the class folders", f"set {PARAMS}.labels=false if folders are no classes")
            elif isinstance(data, Exception):
                yield _unread(data, name)
            else:
                image = decode(data, name)
                yield image if isinstance(image, Broken) else Record(name, image, caption, label)

    @cached_property
    def _pictures(self) -> list[str]:
        return [name for name in self.files.states if PurePosixPath(name).suffix.lower() not in _NO_PICTURES]

    @cached_property
    def _names(self) -> list[str]:
        """Pictures that are there, and those of which only a line of the caption file speaks."""
        names = sorted({*self._pictures, *(self._captions or {})})
        if not names:
            raise UserError(f"key 'prepare.source.params.path': no picture in {self.files.shown()}; change the path")
        return names

    @cached_property
    def _captions(self) -> dict[str, str] | None:
        there = [name for name in _CAPTION_FILES if name in self.files.states]
        if len(there) > 1:
            raise UserError(f"{self.files.shown()}: both {' and '.join(there)} are there; keep one")
        return self._read_captions(there[0]) if there else None

    def _read_captions(self, name: str) -> dict[str, str]:
        captions: dict[str, str] = {}
        columns: set[str] = set()
        with self.files.open(name) as file:
            for number, line in enumerate(file, 1):
                place = f"{self.files.shown(name)}: line {number}"
                try:
                    row = json.loads(line) if line.strip() else None
                except ValueError as error:
                    raise UserError(f"{place}: no JSON in UTF-8: {error}; mend the line") from None
                if row is None:
                    continue
                picture = row.get("file_name") if isinstance(row, dict) else None
                if not isinstance(picture, str) or picture in captions:
                    raise UserError(f"{place}: needs a 'file_name' that no other line has; mend the line")
                caption = caption_in(row.get(self.caption_column), picture)
                if isinstance(caption, Broken):
                    raise UserError(f"{place}: {self.caption_column!r} is no text; mend the line")
                captions[picture] = caption
                columns.update(row)
        if self.caption_column not in columns:
            raise UserError(
                f"key 'prepare.source.params.caption_column': {self.files.shown(name)} has no column "
                f"{self.caption_column!r}; it has: {', '.join(sorted(columns)) or 'none'}"
            )
        return captions

    def _caption(self, name: str) -> str | bool:
        """The caption, or whether a text file holds it."""
        if self._captions is not None:
            return self._captions.get(name, "")
        return _text_file(name) in self.files.states

    def _part(self, names: list[str]) -> Part:
        labels, captions = [self._label(name) for name in names], [self._caption(name) for name in names]
        states, digest = self.files.states, hashlib.sha256()
        for name, label, caption in zip(names, labels, captions, strict=True):
            row = (name, label, caption, states.get(name), states.get(_text_file(name)))
            digest.update(json.dumps(row).encode())
        # Named after its first file, unless that only happens to be the first of all.
        name = f"block-{_hash(names[0])}" if _begins_block(names[0]) else "block-first"
        where = {"files": names, "labels": labels, "captions": captions, "num_classes": self.num_classes}
        return Part(name, digest.hexdigest(), len(names), where)

    def _label(self, name: str) -> int:
        if not self.class_names:
            return 0
        return self._numbers.get(name.partition("/")[0], -1) if "/" in name else -1

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.class_names)}


def _begins_block(name: str) -> bool:
    return int(_hash(name), 16) % BLOCK_SIZE == 0


def _hash(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _text_file(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(".txt"))


def _read_caption(data: bytes | Exception, name: str) -> str | Broken:
    return _unread(data, name) if isinstance(data, Exception) else caption_of(data, name)


def _unread(error: Exception, name: str) -> Broken:
    cause = "missing file" if isinstance(error, FileNotFoundError) else "unreadable file"
    return Broken(name, cause, " ".join(f"{type(error).__name__}: {error}".split()))
