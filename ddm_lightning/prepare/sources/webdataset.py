"""WebDataset: tars with the files of one sample side by side, as written by img2dataset."""

from __future__ import annotations

import itertools
import re
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from posixpath import normpath
from tarfile import EmptyHeaderError, EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined]
from typing import Any, TypeAlias

from ddm_lightning.core.checks import is_int
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import parse_json
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import BrokenSample, Part, Record
from ddm_lightning.prepare.sources.tables import CAPTION_KEY, TableSource
from ddm_lightning.prepare.sources.urls import PARAMS, Files

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jp2", "avif", "ppm", "img")
_CHECKED = 64
_Members: TypeAlias = dict[str, bytes | Exception]
_META = re.compile(r"__[^/]*__(/|$)")


@SOURCES.register("webdataset")
@dataclass(eq=False)
class WebDataset(TableSource):
    """Samples of tars, read in one pass without unpacking. The key is ``<tar>/<file name without extension>``.

    A part is a tar. Columns are extensions (``txt``, ``cls``) or keys of the sample's ``.json``; extensions come first.
    A sample without its caption has an empty one. A column missing from all of the first samples is refused.

    Args:
        path: a folder, one tar, or a pattern such as ``s3://bucket/laion/*.tar``.
        image_column: extension of the image; null for the only file that is an image.
        caption_column: extension or JSON key; null for none.
        label_column: extension or JSON key of the class; null for none.
        group_column: samples of one group are held out together: extension or JSON key; null for none.
        num_classes: labels are numbers below it.
        class_names: labels are these words, numbered from 0.
        follow_links: whether to follow links that lead out of the folder.
    """

    image_column: str | None = None  # type: ignore[assignment]
    # img2dataset writes no .txt without a caption: then the caption is in the JSON.
    caption_column: str | list[str] | None = field(default_factory=["txt", "caption"].copy)
    key_column: None = field(default=None, init=False)
    image_root: None = field(default=None, init=False)

    def parts(self) -> list[Part]:
        """List one part per tar; looks into the first, and into the statistics of img2dataset.

        Raises:
            UserError: no tar, or its first samples lack a column.
        """
        names = self.files.ending(".tar")
        self._check_columns(names[0])
        sizes = self._sizes(names)
        return [Part(name, self.files.states[name], sizes.get(name), {"file": name}) for name in names]

    def _sizes(self, names: list[str]) -> dict[str, int]:
        """Return the number of samples of each tar with a ``…_stats.json`` of img2dataset beside it."""
        beside = {}
        for name in names:
            statistics = f"{name.removesuffix('.tar')}_stats.json"
            if statistics in self.files.states:
                beside[name] = statistics

        sizes = {}
        for name, content in zip(beside, self.files.contents([*beside.values()]), strict=True):
            with suppress(ValueError, TypeError, KeyError):  # unreadable, damaged, or of another program
                found = parse_json(content if isinstance(content, bytes) else b"")
                if is_int(found["successes"], 0):
                    sizes[name] = found["successes"]

        return sizes

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        """Yield the samples of the tar. In a damaged one, a ``BrokenSample`` stands for the rest.

        Raises:
            UserError: the connection broke.
        """
        name = part.where["file"]
        for key, members in samples_of(self.files, name):
            yield self._sample(f"{name}/{key}" if key else name, members)

    def _check_columns(self, name: str) -> None:
        existing = dict[str, Any]()
        num_samples = 0
        for _, members in itertools.islice(samples_of(self.files, name), _CHECKED):
            if isinstance(members, dict):
                num_samples += 1
                existing |= _cells(members)

        if not num_samples:
            return

        has_captions = not existing.keys().isdisjoint(self.captions)
        for key, column in self.roles:
            if column not in existing and not (key == CAPTION_KEY and has_captions):
                raise UserError(
                    f"key {key!r}: none of the first {num_samples} samples of {self.files.shown(name)} has "
                    f"{column!r}; they have: {', '.join(existing)}; or set it to null"
                )

    def _sample(self, key: str, members: _Members | BrokenSample) -> Record | BrokenSample:
        if isinstance(members, BrokenSample):
            return replace(members, key=key)

        cells = _cells(members)
        if isinstance(error := cells.get("json"), Exception):
            return BrokenSample(key, "damaged JSON", str(error))

        names: tuple[str, ...] = _IMAGES
        if self.image_column:
            names = (self.image_column,)

        images = [*filter(members.__contains__, names)]
        if len(images) != 1:
            cause = "several images" if images else "no image"
            return BrokenSample(key, cause, f"it has: {', '.join(cells)}; set {PARAMS}.image_column")

        row = dict.fromkeys(self.columns) | cells
        return self.record({**row, self.image_column: members[images[0]]}, key)


def _cells(members: _Members) -> dict[str, Any]:
    """Join a sample's files, by extension, and the keys of its JSON; ``json`` is an error if the JSON is damaged."""
    try:
        about = parse_json(members.get("json", b"{}"))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        return {**members, "json": error}

    return {**members, **(about if isinstance(about, dict) else {}), **members}


def samples_of(files: Files, name: str) -> Iterator[tuple[str, _Members | BrokenSample]]:
    """Yield key and members (content by extension) of every sample in a tar; ``BrokenSample`` for bad ones.

    Adjacent files with the same name up to the first dot are one sample. A second image of one extension begins another
    sample; a second file of another extension is ignored. Folders, hidden files and ``__...__`` are skipped. A link has
    the content of the earlier file to which it leads. Damage ends the tar: the damaged sample and the rest are
    ``BrokenSample``.
    """
    key = ""
    members = _Members()
    earlier = dict[str, tarfile.TarInfo]()
    try:
        # Zeros end a tar, but also stand between joined ones and where a download has left a hole.
        with files.open(name) as file, tarfile.open(fileobj=file, mode="r|", tarinfo=_Member, ignore_zeros=True) as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                target: tarfile.TarInfo | None = member
                if member.islnk() or member.issym():
                    target = earlier.get(_target_of(member))
                if target is not None:
                    earlier[normpath(member.name)] = target

                is_file = target is None or target.isreg()
                if not is_file or base.startswith(".") or _META.match(member.name):
                    continue

                stem, dot, extension = base.partition(".")
                if folder:
                    stem = f"{folder}/{stem}"

                extension = extension.lower()
                if stem == key and extension in members and extension not in _IMAGES:
                    continue

                if stem != key or extension in members:
                    if members:
                        yield key, members

                    key = stem
                    members = {}

                if not dot:
                    yield stem, BrokenSample(stem, "no extension")
                    continue

                if target is member:
                    content = tar.extractfile(member)
                    assert content is not None  # a regular file
                    members[extension] = content.read()
                elif target is None:
                    line = f"link to {member.linkname!r}, of which there is no file before"
                    members[extension] = FileNotFoundError(line)
                else:  # the one pass over the tar has left it behind
                    place = file.tell()
                    file.seek(target.offset_data)
                    members[extension] = file.read(target.size)
                    file.seek(place)
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        if members:
            yield key, BrokenSample(key, "damaged tar", "the damage is in or after this sample")

        detail = f"nothing after {key or 'its start'!r} can be read: {error}"
        yield "", BrokenSample("", "rest of a damaged tar", detail)
        return

    if members:
        yield key, members


def _target_of(link: tarfile.TarInfo) -> str:
    """Return the name to which a link leads; a soft one is relative to its folder."""
    return normpath(f"{link.name}/../{link.linkname}" if link.issym() else link.linkname)


class _Member(tarfile.TarInfo):
    """Header that raises if it is damaged; tarfile would mistake damage between two files for the end."""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> _Member:
        try:
            member = super().fromtarfile(tarfile)
        except EOFHeaderError:
            tarfile.ended = True
            raise
        except HeaderError as error:
            if isinstance(error, EmptyHeaderError) and getattr(tarfile, "ended", False):
                raise

            raise ReadError(str(error)) from None

        tarfile.ended = False
        return member
