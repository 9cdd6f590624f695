"""The samples of one part of a source: checked, squared, in chunks; broken ones counted and set aside."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.plugins import Plugins
from ddm_lightning.prepare.records import Broken, Part, Record

SAMPLES_AT_ONCE = 256


class Reading:
    """One pass over a part.

    Args:
        part: what to read.
        plugins: whose source is read.
        tick: called with the samples read so far.
        at_once: samples in a chunk.
    """

    def __init__(
        self, part: Part, plugins: Plugins, tick: Callable[[int], None], at_once: int = SAMPLES_AT_ONCE
    ) -> None:
        self.part, self.plugins, self.tick, self.at_once = part, plugins, tick, at_once
        self.num_read = 0
        """Samples met so far, broken ones included."""
        self.num_rows = 0
        """Samples handed on."""
        self.broken: list[Broken] = []
        """Those that were not."""
        self.unread_captions: dict[str, str] = {}
        """Row -> why its caption cannot be read; it counts as empty."""
        self.odd_shapes: Counter[str] = Counter()
        """How many pictures suffer from being made square, by how."""
        self.content = hashlib.sha256()
        """Of the samples met so far, pixels included."""

    @property
    def causes(self) -> dict[str, int]:
        """How many samples are broken, by cause."""
        return dict(sorted(Counter(broken.cause for broken in self.broken).items()))

    def chunks(self) -> Iterator[tuple[list[Record], UInt8[np.ndarray, "n h w 3"]]]:
        """Up to ``at_once`` samples at a time, with their square pictures.

        Raises:
            UserError: the source breaks its contract, or pictures have several sizes and none is set.
        """
        records: list[Record] = []
        images: list[UInt8[np.ndarray, "h w 3"]] = []
        for found in self.plugins.source.read(self.part):
            self.num_read += 1
            found = _with_plain_text(found)
            if isinstance(found, Broken):
                self.broken.append(found)
                self.content.update(repr((found.key, found.cause)).encode())
                continue
            image = self._square(found)
            self.content.update(repr((found.key, found.caption, found.label, found.group, image.shape)).encode())
            self.content.update(image.tobytes())
            if images and image.shape != images[0].shape:
                raise self._sizes_differ(found, f"others have {images[0].shape[1]} x {images[0].shape[0]}")
            if isinstance(found.caption, Broken):
                self.unread_captions[str(self.num_rows + len(records))] = found.caption.cause
                found = replace(found, caption="")
            records.append(found)
            images.append(image)
            if len(records) == self.at_once:
                yield self._chunk(records, images)
                records, images = [], []
        if records:
            yield self._chunk(records, images)
        self.tick(self.num_read)

    def _chunk(
        self, records: list[Record], images: list[UInt8[np.ndarray, "h w 3"]]
    ) -> tuple[list[Record], UInt8[np.ndarray, "n h w 3"]]:
        self.num_rows += len(records)
        self.tick(self.num_read)
        return records, np.stack(images)

    def _square(self, record: Record) -> UInt8[np.ndarray, "h w 3"]:
        pictures = self.plugins.config.pictures
        image = record.image
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise self._refuse(f"sample {record.key!r} is no uint8 RGB picture ({image.dtype} {list(image.shape)})")
        if not 0 <= record.label < self.plugins.source.num_classes:
            most = self.plugins.source.num_classes - 1
            raise self._refuse(f"sample {record.key!r} has label {record.label}, outside 0 to {most}")
        if pictures.size is not None:
            shorter, longer = sorted(image.shape[:2])
            self.odd_shapes["enlarged more than twofold"] += shorter * 2 < pictures.size
            self.odd_shapes["longer than 3 to 1"] += longer > 3 * shorter
            return to_square(image, pictures.size, pictures.aspect)
        if image.shape[0] != image.shape[1]:
            raise self._sizes_differ(record, "is not square")
        return image

    def _refuse(self, problem: str) -> UserError:
        name = self.plugins.config.source.name
        return UserError(f"source {name!r}: {problem}; mend the source (prepare/records.py says what it must yield)")

    def _sizes_differ(self, record: Record, how: str) -> UserError:
        height, width = record.image.shape[:2]
        return UserError(
            f"source {self.plugins.config.source.name!r}: sample {record.key!r} has {width} x {height} pixels and "
            f"{how}; set prepare.pictures.size"
        )


def _with_plain_text(found: Record | Broken) -> Record | Broken:
    """A record, or why its key or caption cannot be stored."""
    if isinstance(found, Record):
        try:
            f"{found.key}{found.group or ''}".encode()
        except UnicodeEncodeError as error:
            return Broken(repr(found.key), "text that UTF-8 cannot hold", str(error))
        try:
            str(found.caption).encode()
        except UnicodeEncodeError as error:
            return replace(found, caption=Broken(found.key, "text that UTF-8 cannot hold", str(error)))
    return found


ASPECTS = ("crop", "pad", "stretch")


def to_square(image: UInt8[np.ndarray, "h w 3"], size: int, aspect: str) -> UInt8[np.ndarray, "size size 3"]:
    """The picture at ``size`` × ``size`` pixels (Lanczos).

    Args:
        image: RGB.
        size: height and width of the result.
        aspect: ``crop`` keeps the middle of the longer side, as ADM and DiT do; ``pad`` keeps the whole picture, on
            white; ``stretch`` keeps the whole picture and changes its proportions.

    Raises:
        ValueError: unknown ``aspect``.
    """
    if aspect not in ASPECTS:
        raise ValueError(f"aspect {aspect!r} is none of {', '.join(ASPECTS)}")
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    picture = Image.fromarray(image)
    if aspect == "crop":
        side = min(height, width)
        left, top = (width - side) / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
        return np.asarray(picture.resize((size, size), Image.Resampling.LANCZOS, box=box))
    if aspect == "stretch":
        return np.asarray(picture.resize((size, size), Image.Resampling.LANCZOS))
    longer = max(height, width)
    inner = (max(1, round(width * size / longer)), max(1, round(height * size / longer)))
    sheet = Image.new("RGB", (size, size), "white")
    sheet.paste(picture.resize(inner, Image.Resampling.LANCZOS), ((size - inner[0]) // 2, (size - inner[1]) // 2))
    return np.asarray(sheet)
