"""A folder of images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import PurePosixPath

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import BrokenSample, Part, Record, block_size_of
from ddm_lightning.prepare.sources.decode import caption_in, decode
from ddm_lightning.prepare.sources.tables import PARAMS
from ddm_lightning.prepare.sources.urls import Files

_CAPTION_FILES = ("captions.jsonl", "metadata.jsonl")
# Files that are no images. All others count as images, so that those of an unknown format are reported as broken.
_NO_IMAGES = frozenset((".txt", ".json", ".jsonl", ".csv", ".tsv", ".md", ".parquet", ".html", ".py", ".zip", ".tar"))


@SOURCES.register("imagefolder")
class ImageFolder:
    """All images below a folder; the key is the path in it.

    The class is the first-level folder, numbered in alphabetical order. Captions come from ``captions.jsonl`` or
    ``metadata.jsonl`` at the top (by ``file_name``), or else from the text file of the same name (``cat.jpg``,
    ``cat.txt``). An image without either has an empty caption.

    Args:
        path: the folder, local or a URL.
        caption_column: key in the JSONL file.
        labels: whether first-level folders are classes.
    """

    packages: tuple[str, ...] = ("pillow",)
    attribution = ""

    def __init__(self, path: str, caption_column: str = "caption", labels: bool = True) -> None:
        self.files = Files(path)
        self.caption_column, self.labels = caption_column, labels

    @cached_property
    def class_names(self) -> list[str]:
        """First-level folders with images."""
        return sorted({name.partition("/")[0] for name in self._images if "/" in name}) if self.labels else []

    @cached_property
    def num_classes(self) -> int:
        """Number of class folders, at least 1."""
        return max(1, len(self.class_names))

    def parts(self) -> list[Part]:
        """List blocks of images with the names of their files.

        The hash of a name decides whether it begins a block, so a new file changes only its own block.
        """
        names = self._names
        starts = [0, *(index for index, name in enumerate(names) if index and self._begins_block(name)), len(names)]
        return [self._part(names[start:stop]) for start, stop in pairwise(starts)]

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        # From the part, so that no worker lists the folder again.
        self.num_classes = part.where["num_classes"]
        names, captions = part.where["files"], part.where["captions"]
        texts = self.files.contents(
            [_text_file(name) for name, found in zip(names, captions, strict=True) if found is True]
        )
        for name, label, found, data in zip(
            names, part.where["labels"], captions, self.files.contents(names), strict=True
        ):
            caption = caption_in(next(texts) if found is True else found, name)
            if label < 0:
                yield BrokenSample(
                    name, "outside the class folders", f"set {PARAMS}.labels=false if folders are not classes"
                )
                continue
            image = decode(data, name)
            bad = next((one for one in (image, caption) if isinstance(one, BrokenSample)), None)
            yield bad or Record(name, image, caption, label)  # type: ignore[arg-type]

    @cached_property
    def _images(self) -> list[str]:
        return [name for name in self.files.states if PurePosixPath(name).suffix.lower() not in _NO_IMAGES]

    @cached_property
    def _names(self) -> list[str]:
        """Images in the folder, and those named only by the caption file."""
        names = sorted({*self._images, *(self._captions or {})})
        if not names:
            raise UserError(f"key '{PARAMS}.path': no image in {self.files.shown()}; change the path")
        return names

    @cached_property
    def _captions(self) -> dict[str, str] | None:
        """Captions in the caption file by name of the image; None without such a file."""
        if all(name in self.files.states for name in _CAPTION_FILES):
            raise UserError(f"{self.files.shown()}: has both {' and '.join(_CAPTION_FILES)}; keep one")
        name = next((name for name in _CAPTION_FILES if name in self.files.states), None)
        if name is None:
            return None
        captions, columns = dict[str, str](), set[str]()
        for number, line in enumerate(self.files.content(name).split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                image, caption = row["file_name"], caption_in(row.get(self.caption_column), "")
                if not isinstance(image, str) or image in captions or isinstance(caption, BrokenSample):
                    raise ValueError(f"'file_name' or {self.caption_column!r} is not text, or the name is not unique")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{self.files.shown(name)}: line {number}: needs JSON with its own 'file_name' ({error!r}); "
                    "fix the line"
                ) from None
            captions[image] = caption
            columns.update(row)
        if self.caption_column not in columns:
            raise UserError(
                f"key '{PARAMS}.caption_column': {self.files.shown(name)} has no column {self.caption_column!r}; "
                f"it has: {', '.join(sorted(columns)) or 'none'}"
            )
        return captions

    def _part(self, names: list[str]) -> Part:
        states, digest = self.files.states, hashlib.sha256()
        numbers = {name: number for number, name in enumerate(self.class_names)}
        labels, captions = list[int](), list[str | bool | None]()  # a caption is True if a text file holds it
        for name in names:
            text = _text_file(name)
            labels.append(numbers.get(name.rpartition("/")[0].partition("/")[0], -1) if numbers else 0)
            captions.append((text in states or None) if self._captions is None else self._captions.get(name))
            digest.update(json.dumps((name, labels[-1], captions[-1], states.get(name), states.get(text))).encode())
        # A block is named after the file that begins it; only the first one may lack such a file.
        name = f"block-{_hash(names[0])}" if self._begins_block(names[0]) else "block-first"
        where = {"files": names, "labels": labels, "captions": captions, "num_classes": self.num_classes}
        return Part(name, digest.hexdigest(), len(names), where)

    def _begins_block(self, name: str) -> bool:
        return int(_hash(name), 16) % block_size_of(len(self._names)) == 0


def _hash(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _text_file(name: str) -> str:
    return str(PurePosixPath(name).with_suffix(".txt"))
