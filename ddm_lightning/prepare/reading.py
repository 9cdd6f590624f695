"""One pass over samples: chunks of checked, resized images, and broken samples.

Reading and decoding run in a thread, one chunk ahead of the encoders.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from threading import Thread
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch.nn import functional

from ddm_lightning.core.buckets import Bucket, Size
from ddm_lightning.core.errors import UserError
from ddm_lightning.encoders.interfaces import (
    Images,
)
from ddm_lightning.partition.columns import RowNumbers
from ddm_lightning.prepare.filters import (
    ENLARGED,
    IN_DROP_KEYS,
    number_in,
    properties,
)
from ddm_lightning.prepare.plugins import Plugins
from ddm_lightning.prepare.records import BrokenSample, Pixels, Record

Item = TypeVar("Item")

IMAGES_AT_ONCE = 64
"""Images read before the encoders begin; few, because a part may have only some hundred."""
# Of bytes, four times as fast as Pillow's; since torch 2.13.
_HAS_LANCZOS = hasattr(torch.ops.aten, "_upsample_lanczos2d_aa")
_FIX = "fix the source (its contract: prepare/records.py)"
_SET_SIZE = "set prepare.images.size"


@dataclass(frozen=True)
class Chunk:
    """Some samples of one pass."""

    first: int
    """Row of the first one."""
    records: list[Record]
    images: list[Pixels] | Images
    """What is encoded: images of the sizes of their buckets; without buckets, ``squares``."""
    squares: Images
    """The whole images, for features; without buckets the same ones."""
    buckets: RowNumbers
    """Number of each sample's bucket; 0 without buckets."""

    def of_bucket(self, number: int) -> tuple[RowNumbers, Images]:
        """Return the rows and images of a bucket; without images, one empty array."""
        places = np.flatnonzero(self.buckets == number)
        images = self.images
        if isinstance(images, list):
            images = np.array([images[place] for place in places])

        return self.first + places, images


class Reading:
    """One pass over samples, such as those of a part.

    Args:
        found: from ``Plugins.read``.
        plugins: the source and the configuration.
    """

    def __init__(self, found: Iterable[Record | BrokenSample], plugins: Plugins) -> None:
        self.found = found
        self.plugins = plugins
        self.config = plugins.config
        self.sizes = [bucket.size for bucket in plugins.buckets]
        """Sizes of the buckets."""
        self.num_read = 0
        """Samples read so far, with those that are broken or taken out by filters."""
        self.num_rows = 0
        """Samples yielded so far."""
        self.image_size = 0
        """Height and width of their images; 0 before the first one."""
        self.broken: list[BrokenSample] = []
        """Broken samples so far."""
        self.filtered = Counter({IN_DROP_KEYS: 0} if plugins.config.drop_keys else {})
        """Samples taken out so far, by filter."""
        self.buckets: list[int] = []
        """Number of the bucket of each sample so far."""
        self.cropped: list[float] = []
        """Share of the pixels of each that is cropped away, with buckets."""
        self.content = hashlib.sha256()
        """Hash of the samples so far, pixels included."""

    def facts(self) -> dict[str, Any]:
        """Return the facts of a complete pass that the index needs, as JSON."""
        return {
            "num_rows": self.num_rows,
            "num_read": self.num_read,
            "broken": dict(sorted(Counter(broken.cause for broken in self.broken).items())),
            "filtered": dict(sorted(self.filtered.items())),
            "content": self.content.hexdigest(),
            "image_size": self.image_size,
        }

    def chunks(self) -> Iterator[Chunk]:
        """Yield up to ``IMAGES_AT_ONCE`` samples at a time.

        Raises:
            UserError: the source breaks its contract, or images differ in size and no size is set.
        """
        samples = self._samples()
        while chunk := list(islice(samples, IMAGES_AT_ONCE)):
            first = self.num_rows
            self.num_rows += len(chunk)
            records, images, squares = map(list, zip(*chunk, strict=True))
            stacked = np.stack(squares)
            buckets = np.array(self.buckets[first : self.num_rows])
            yield Chunk(first, records, images if self.sizes else stacked, stacked, buckets)

    def _samples(self) -> Iterator[tuple[Record, Pixels, Pixels]]:
        size = self.config.images.size
        for found in self.found:
            self.num_read += 1
            if isinstance(found, Record):
                self._check(found)

            record = self._kept(found)
            if record is None:
                continue

            number, target = self.plugins.target(record.size)
            image = square = self._resized(record, target)
            facts = vars(record) | {"image": image.shape}
            del facts["full_size"]  # as before there was one
            self.content.update(repr(facts).encode())
            self.content.update(np.ascontiguousarray(image).data)
            if size is not None and self.sizes:
                square = to_square(record.image, size, "stretch", record.full_size)
                self.content.update(square.tobytes())

            self.buckets.append(number)
            self.cropped.append(_share_cropped(record.size, image))
            self.image_size = self.image_size or len(square)
            if len(square) != self.image_size:
                others = f"{self.image_size} x {self.image_size}"
                raise self._error(record, f"has {_size(image)} pixels, others have {others}", _SET_SIZE)

            yield record, image, square

    def _check(self, record: Record) -> None:
        image = record.image
        num_classes = self.plugins.source.num_classes
        if not isinstance(record.key, str) or not isinstance(record.caption, str):
            raise self._error(record, f"has a key or caption that is no text ({record.caption!r:.60})")
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
            raise self._error(record, f"is not a uint8 RGB image ({image.dtype} {list(image.shape)})")
        if not 0 <= record.label < num_classes:
            raise self._error(record, f"has label {record.label}, outside 0 to {num_classes - 1}")

    def _kept(self, found: Record | BrokenSample) -> Record | None:
        """Return a usable record with the values of ``prepare.keep`` as numbers, NaN for none; count any other."""
        found = _with_plain_text(found)
        if isinstance(found, BrokenSample):
            self.broken.append(found)
            self.content.update(repr((found.key, found.cause)).encode())
            return None

        _, target = self.plugins.target(found.size)
        cropped_to = target if self.config.images.aspect == "crop" else None
        values = {**found.values, **properties(found.size, cropped_to)}
        cause = self.plugins.filters.cause(found.key, values)
        if cause is None and target is not None and self._is_enlarged(found.size, target):
            cause = ENLARGED

        if cause is not None:
            self.filtered[cause] += 1
            self.content.update(repr((found.key, cause)).encode())
            return None

        kept = {}
        for name in self.config.keep:
            value = values[name]
            kept[name] = number_in(value)
            if math.isnan(kept[name]) and not isinstance(value, (NoneType, float, np.floating)):
                raise self._error(found, f"has {value!r:.60} in column {name!r}", "remove it from prepare.keep")

        return replace(found, values=kept)

    def _is_enlarged(self, size: Size, target: Size) -> bool:
        """Whether ``prepare.images.upscale`` forbids to resize an image."""
        images = self.config.images
        is_smaller = [own < wanted for own, wanted in zip(size, target, strict=True)]
        return not images.upscale and (all(is_smaller) if images.aspect == "pad" else any(is_smaller))

    def _resized(self, record: Record, target: Size | None) -> Pixels:
        image = record.image
        if target is not None and self.sizes:
            return cropped(image, target, record.full_size)
        if target is not None:
            return to_square(image, target[0], self.config.images.aspect, record.full_size)
        if image.shape[0] != image.shape[1]:
            raise self._error(record, f"has {_size(image)} pixels and is not square", _SET_SIZE)

        return image

    def _error(self, record: Record, problem: str, remedy: str = _FIX) -> UserError:
        return UserError(f"source {self.config.source.name!r}: sample {record.key!r} {problem}; {remedy}")


def count_buckets(
    buckets: Sequence[Bucket], numbers: RowNumbers, share_cropped: Float[np.ndarray, "n"]
) -> dict[str, tuple[int, float]]:
    """Count images by bucket, and in all; buckets without images are left out.

    Args:
        buckets: the table.
        numbers: number of the bucket of each image.
        share_cropped: share of the pixels of each image that is cropped away.

    Returns:
        Images by bucket, and the mean share of theirs that is cropped away.
    """
    counts = {}
    for number, bucket in enumerate(buckets):
        if (is_here := numbers == number).any():
            counts[bucket.name] = int(is_here.sum()), float(share_cropped[is_here].mean())

    counts["all"] = len(numbers), float(share_cropped.mean())
    return counts


def _size(image: Pixels) -> str:
    return f"{image.shape[1]} x {image.shape[0]}"


def _with_plain_text(found: Record | BrokenSample) -> Record | BrokenSample:
    """Return the sample, or a ``BrokenSample`` if UTF-8 cannot store its text."""
    texts = [found.key]
    if isinstance(found, Record):
        texts += [found.group or "", found.caption, *found.captions]

    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        return BrokenSample(
            found.key.encode(errors="backslashreplace").decode(), "text that UTF-8 cannot hold", str(error)
        )

    return found


def _share_cropped(size: Size, middle: Pixels) -> float:
    """Return the share of an image's pixels outside the proportions of its middle."""
    aspect = size[0] * middle.shape[1] / (size[1] * middle.shape[0])
    return 1 - min(aspect, 1 / aspect)


def cropped(image: Pixels, size: Size, full_size: Size | None = None) -> Pixels:
    """Resize an image to cover height and width of ``size`` (Lanczos), and keep the middle of its longer side.

    Args:
        image: RGB.
        size: height and width of the result.
        full_size: see ``Record``. A reduced image is cut at whole pixels, for speed; they are at most half as large as
            the result's.
    """
    if image.shape[:2] == size:
        return image

    height, width = _extent(image, full_size)
    own_height, own_width = height, width
    aspect = size[1] / size[0]
    if width / height > aspect:
        own_width = aspect * height
    elif width / height < aspect:
        own_height = width / aspect

    top = (height - own_height) / 2
    left = (width - own_width) / 2
    return _resized(image, size, (top, left, own_height, own_width), full_size is not None)


def _resized(image: Pixels, size: Size, box: tuple[float, ...], is_reduced: bool) -> Pixels:
    """Resize the part of an image that begins at the first two numbers of ``box`` and has the last two as its size."""
    top, left, height, width = box
    inner: tuple[float, float, float, float] | None = (left, top, left + width, top + height)
    if is_reduced:  # cut at whole pixels
        image = np.array(image[round(top) :, round(left) :][: int(height), : int(width)])
        inner = None
        if _HAS_LANCZOS:
            pixels = torch.from_numpy(image)[None].permute(0, 3, 1, 2)
            resized = functional.interpolate(pixels, size, mode="lanczos", antialias=True)
            return resized[0].permute(1, 2, 0).numpy()

    return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.LANCZOS, inner))


def _extent(image: Pixels, full_size: Size | None) -> tuple[float, float]:
    """Return height and width in pixels of a decoded image; less than a pixel beyond them is the decoder's filling."""
    height, width = image.shape[:2]
    if full_size is None:
        return height, width

    factor = round(full_size[0] / height)
    return full_size[0] / factor, full_size[1] / factor


def to_square(image: Pixels, size: int, aspect: str, full_size: Size | None = None) -> Pixels:
    """Resize an image to ``size`` × ``size`` pixels (Lanczos).

    Args:
        image: RGB.
        size: height and width of the result.
        aspect: ``crop`` keeps the middle of the longer side, as ADM and DiT do; ``pad`` keeps the whole image, on
            white; ``stretch`` keeps the whole image and changes its proportions.
        full_size: see ``Record``.
    """
    if image.shape[:2] == (size, size):
        return image
    if aspect == "crop":
        return cropped(image, (size, size), full_size)

    is_reduced = full_size is not None
    extent = _extent(image, full_size)
    box = (0, 0, *extent)
    if aspect == "stretch":
        return _resized(image, (size, size), box, is_reduced)

    sides = full_size or extent
    height, width = (max(1, round(side * size / max(sides))) for side in sides)
    sheet = np.full((size, size, 3), 255, np.uint8)
    sheet[(size - height) // 2 :, (size - width) // 2 :][:height, :width] = _resized(
        image, (height, width), box, is_reduced
    )
    return sheet


def one_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield ``items``; a thread makes the next one meanwhile. Errors are raised in the place of their item."""

    def begin_next() -> Future[list[Item]]:
        following = Future[list[Item]]()

        def make() -> None:
            try:
                following.set_result(list(islice(items, 1)))
            except BaseException as error:  # noqa: BLE001  raised where the item is wanted
                following.set_exception(error)

        # A daemon, so that Ctrl-C need not wait for a slow server; the program's end waits for threads of a pool.
        Thread(target=make, name="read", daemon=True).start()
        return following

    following = begin_next()
    while made := following.result():
        following = begin_next()
        yield made.pop()
