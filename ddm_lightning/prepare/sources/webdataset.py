"""WebDataset: tars in which the files of one sample stand side by side, as img2dataset writes them."""

from __future__ import annotations

import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from tarfile import EmptyHeaderError, EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined]
from typing import Any, BinaryIO

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import Broken, Part, Record
from ddm_lightning.prepare.sources.columns import PARAMS, Labels, record
from ddm_lightning.prepare.sources.urls import Files, WatchedFile

_PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jp2", "avif", "ppm", "img")
_ABSENT = object()
_FIRST = 64
_META = re.compile(r"__[^/]*__(/|$)")


@SOURCES.register("webdataset")
class WebDataset:
    """Samples of tars, read in one pass and never unpacked; the key is ``<tar>/<name of the files without extension>``.

    A part is a tar. Columns are extensions (``txt``, ``cls``) or, where no file has that extension, keys of the
    sample's ``.json``. A sample without its caption has an empty one; where none of the first samples has a column that
    was named, the name is taken for a mistake.

    Args:
        path: a folder, one tar, or a pattern such as ``s3://bucket/laion/*.tar``.
        image_column: extension of the picture; null takes the one file that is a picture.
        caption_column: extension or JSON key; null for none.
        label_column: extension or JSON key of the class; null for none.
        group_column: extension or JSON key of what is held out together; null for none.
        num_classes: labels are numbers below it.
        class_names: labels are these words, numbered from 0.
    """

    packages: tuple[str, ...] = ("pillow",)
    attribution = ""

    def __init__(
        self,
        path: str,
        image_column: str | None = None,
        caption_column: str | None = "txt",
        label_column: str | None = None,
        group_column: str | None = None,
        num_classes: int | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        self.labels = Labels(label_column, num_classes, class_names)
        self.num_classes, self.class_names = self.labels.num_classes, self.labels.class_names
        self.image_column, self.caption_column, self.group_column = image_column, caption_column, group_column
        self.files = Files(path)

    def parts(self) -> list[Part]:
        """One a tar; looks into the first.

        Raises:
            UserError: no tar, or its first samples lack a column.
        """
        names = self.files.ending(".tar")
        self._check_columns(names[0])
        return [Part(name, self.files.states[name], None, {"file": name}) for name in names]

    def read(self, part: Part) -> Iterator[Record | Broken]:
        """Samples of the tar; where it is damaged, ``Broken`` stands for what follows.

        Raises:
            UserError: the tar cannot be fetched to its end.
        """
        name = part.where["file"]
        with self.files.open(name) as file:
            try:
                for key, members in samples_of(file):
                    yield self._sample(f"{name}/{key}" if key else name, members)
            except Exception:
                file.raise_failure()
                raise

    def _check_columns(self, name: str) -> None:
        with self.files.open(name) as file:
            try:
                found = [
                    members for _, members in itertools.islice(samples_of(file), _FIRST) if isinstance(members, dict)
                ]
            except Exception:
                file.raise_failure()
                raise
        there = dict.fromkeys(column for members in found for column in (*members, *_about(members)))
        named = {
            "image": self.image_column,
            "caption": self.caption_column,
            "label": self.labels.column,
            "group": self.group_column,
        }
        if self.caption_column == "txt" and "caption" in there:  # img2dataset writes no .txt when there is no caption
            del named["caption"]
        for role, column in named.items():
            if found and column is not None and column not in there:
                raise UserError(
                    f"key '{PARAMS}.{role}_column': none of the first {len(found)} samples of {self.files.shown(name)} "
                    f"has {column!r}; they have: {', '.join(there)}"
                    + ("; or set it to null" if role != "image" else "")
                )

    def _sample(self, key: str, members: dict[str, bytes] | Broken) -> Record | Broken:
        if isinstance(members, Broken):
            return Broken(key, members.cause, members.detail)
        try:
            about = json.loads(members["json"]) if "json" in members else {}
        except ValueError as error:
            return Broken(key, "damaged JSON", str(error))
        there = f"it has the extensions {', '.join(members)}"
        if isinstance(about, dict) and about:
            there += f" and, in its JSON, {', '.join(map(str, about))}"
        wanted = [self.image_column] if self.image_column else _PICTURES
        pictures = [extension for extension in wanted if extension in members]
        if len(pictures) != 1:
            return Broken(key, "several pictures" if pictures else "no picture", f"{there}; set {PARAMS}.image_column")
        caption = _cell(self.caption_column, members, about)
        if caption is _ABSENT and self.caption_column == "txt":  # img2dataset writes no .txt when there is no caption
            caption = _cell("caption", members, about)
        label = _cell(self.labels.column, members, about)
        group = _cell(self.group_column, members, about)
        caption = None if caption is _ABSENT else caption
        for role, column, cell in (("label", self.labels.column, label), ("group", self.group_column, group)):
            if cell is _ABSENT:
                return Broken(key, f"no {role}", f"no {column!r}: {there}; mend {PARAMS}.{role}_column")
        return record(key, members[pictures[0]], caption, self.labels, label, group)


def samples_of(file: BinaryIO | WatchedFile) -> Iterator[tuple[str, dict[str, bytes] | Broken]]:
    """Key and members (extension -> content) of every sample in a tar, and ``Broken`` where a sample is none.

    Files that stand side by side and are equal up to the first dot of their name are one sample. Folders, links,
    hidden files and ``__...__`` are none. Damage ends the tar: the sample it lies in and the rest are ``Broken``.
    """
    key, members = "", dict[str, bytes]()
    try:
        # Behind zeros another tar may follow, when somebody joined two with cat.
        with _Tar.open(fileobj=file, mode="r|", ignore_zeros=True) as tar:
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                if not member.isreg() or base.startswith(".") or _META.match(member.name):
                    continue
                stem, dot, extension = base.partition(".")
                stem, extension = f"{folder}/{stem}" if folder else stem, extension.lower()
                if stem != key or extension in members:
                    if members:
                        yield key, members
                    key, members = stem, {}
                if not dot:
                    yield stem, Broken(stem, "no extension")
                    continue
                content = tar.extractfile(member)
                members[extension] = content.read() if content else b""
    except (tarfile.TarError, EOFError, UnicodeDecodeError) as error:
        if members:
            yield key, Broken(key, "damaged tar", "the sample behind which, or in which, the damage lies")
        yield "", Broken("", "rest of a damaged tar", f"nothing behind {key or 'its start'!r} can be read: {error}")
        return
    if members:
        yield key, members


def _about(members: dict[str, bytes]) -> dict[str, Any]:
    """What the sample's ``.json`` says; nothing where there is none."""
    try:
        about = json.loads(members.get("json", b"{}"))
    except ValueError:
        return {}
    return about if isinstance(about, dict) else {}


class _Member(tarfile.TarInfo):
    """A header that says so when it is none: tarfile takes damage between two files for the end."""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> _Member:
        try:
            member = super().fromtarfile(tarfile)
        except EOFHeaderError:
            tarfile.has_ended = True
            raise
        except HeaderError as error:
            if tarfile.has_ended and isinstance(error, EmptyHeaderError):
                raise
            raise ReadError(str(error)) from None
        tarfile.has_ended = False
        return member


class _Tar(tarfile.TarFile):
    tarinfo = _Member
    has_ended = False


def _cell(column: str | None, members: dict[str, bytes], about: Any) -> Any:
    """What a column holds; null where there is none, ``_ABSENT`` where the sample has none."""
    if column is None:
        return None
    if column in members:
        return members[column]
    return about.get(column, _ABSENT) if isinstance(about, dict) else _ABSENT
