"""The plug-ins of ``prepare``, and one pass over samples: chunks of checked, square images, and broken samples.

Reading and decoding run in a thread, one chunk ahead of the encoders.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from itertools import chain, islice
from threading import Thread
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps

from ddm_lightning.config.experiment import PrepareConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES
from ddm_lightning.encoders.interfaces import (
    CaptionEncoder,
    Features,
    ImageEncoder,
    Images,
    array_encoding,
    bytes_per_sample,
    numbered,
)
from ddm_lightning.prepare.filters import IN_DROP_KEYS, PROPERTIES, Filters, extra_columns, number_in, properties
from ddm_lightning.prepare.records import BrokenSample, Part, Pixels, Record, Source
from ddm_lightning.prepare.sources.decode import caption_in
from ddm_lightning.shards.manifest import DataSizes

Item = TypeVar("Item")

IMAGES_AT_ONCE = 64
"""Images read before the encoders begin; few, because a part may have only some hundred."""
ENOUGH = 1000
"""Samples to read before a judgement on all."""
_PARTS_TO_LOOK_AT = 20
_FIX = "fix the source (its contract: prepare/records.py)"
_SET_SIZE = "set prepare.images.size"
_COMMON_PACKAGES = ("ddm_lightning", "torch", "numpy", "pillow", "mosaicml-streaming")


def num_captions(config: PrepareConfig) -> int:
    """Return the number of captions of each sample."""
    return max(1, len(config.captions))


class Plugins:
    """Source, encoders and feature network, each built once, on first use.

    Raises:
        UserError: on first use: unknown name, unknown params, or a missing package.
    """

    def __init__(self, config: PrepareConfig) -> None:
        self.config = config

    @cached_property
    def source(self) -> Source:
        """The data set."""
        source = SOURCES.build(self.config.source.name, self.config.source.params)
        if wanted := extra_columns(self.config):
            if not hasattr(source, "extra_columns"):
                column, key = next(iter(wanted.items()))
                raise UserError(
                    f"key {key!r}: source {self.config.source.name!r} has no column {column!r}; "
                    f"of its images there are: {', '.join(PROPERTIES)}"
                )

            source.extra_columns |= wanted

        return source

    @cached_property
    def filters(self) -> Filters:
        """Decides which samples to keep."""
        return Filters(self.config)

    @cached_property
    def image_encoder(self) -> ImageEncoder:
        """Encodes images as ``x_0``."""
        return IMAGE_ENCODERS.build(self.config.image_encoder.name, self.config.image_encoder.params)

    @cached_property
    def caption_encoder(self) -> CaptionEncoder | None:
        """Encodes captions; None without text conditions."""
        plugin = self.config.caption_encoder
        if plugin is None:
            return None

        return CAPTION_ENCODERS.build(plugin.name, plugin.params)

    @cached_property
    def features(self) -> Features:
        """Computes the features to cluster."""
        return FEATURES.build(self.config.features.name, self.config.features.params)

    def _encoders(self) -> dict[str, Any]:
        encoders: dict[str, Any] = {"image_encoder": self.image_encoder}
        if self.caption_encoder is not None:
            encoders["caption_encoder"] = self.caption_encoder

        return encoders | {"features": self.features}

    def versions(self) -> dict[str, str]:
        """Build every plug-in and the filters; return the versions of all packages that shape the result."""
        _ = self.filters
        packages = {*_COMMON_PACKAGES}
        for plugin in (self.source, *self._encoders().values()):
            packages.update(plugin.packages)

        return {name: version(name) for name in sorted(packages)}

    @cached_property
    def parts(self) -> list[Part]:
        """Parts of the source.

        Raises:
            UserError: the source cannot be listed, has no parts, or two of one name.
        """
        name = self.config.source.name
        parts = list(self.source.parts())
        if not parts:
            raise UserError(f"source {name!r}: has no samples; fix prepare.source")

        part, times = Counter(part.name for part in parts).most_common(1)[0]
        if times > 1:
            raise UserError(f"source {name!r}: has {times} parts named {part!r}; fix the source")

        return parts

    def sizes(self) -> DataSizes:
        """Return the sizes of the data to be written; the image size may come from the first readable image.

        Raises:
            UserError: bad input.
        """
        size = self.config.images.size
        if size is None:
            first = next((sample for sample in self.look() if isinstance(sample, Record)), None)
            if first is None:
                raise UserError(f"source {self.config.source.name!r}: no sample can be read; fix prepare.source")

            size = first.image.shape[0]

        return self.sizes_at(size)

    def sizes_at(self, image_size: int) -> DataSizes:
        """Return the sizes of the data of images of ``image_size`` × ``image_size`` pixels."""
        text_size = 0
        token_shape = None
        if self.caption_encoder is not None:
            text_size = self.caption_encoder.size
            token_shape = self.caption_encoder.token_shape

        return DataSizes(self.image_encoder.x_shape(image_size), text_size, token_shape, self.source.num_classes)

    def encodings(self, row_shape: Sequence[int]) -> dict[str, str]:
        """MDS encoding of each column of the shards but sample_id, cluster and captions; ``x_0`` has ``row_shape``."""
        config = self.config
        image = array_encoding(self.image_encoder.dtype, row_shape)
        encodings = {"x_0": image}
        if config.horizontal_flips:
            encodings["x_0_flipped"] = image

        encodings["label"] = "int32"
        num = num_captions(config)
        if self.caption_encoder is not None:
            for number in range(num):
                for name, encoding in self.caption_encoder.columns.items():
                    encodings[numbered(name, number)] = encoding

        if num > 1:
            encodings["has_caption"] = array_encoding("uint8", [num])

        return encodings | dict.fromkeys(config.keep, "float64")

    def sample_bytes(self, sizes: DataSizes) -> int:
        """Return the uncompressed bytes of a sample in the shards, without the texts of its captions."""
        channels, *rest = sizes.x_shape
        if self.image_encoder.stores == "posterior":  # mean and std
            channels *= 2

        return bytes_per_sample(self.encodings([channels, *rest]))

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        """Yield the samples of a part, with the captions of ``prepare.captions``."""
        return map(self._with_captions, self.source.read(part))

    def look(self) -> Iterator[Record | BrokenSample]:
        """Yield about a thousand samples from all over the source, or all of a smaller one."""
        some = self.parts[:: math.ceil(len(self.parts) / _PARTS_TO_LOOK_AT)]
        num = math.ceil(ENOUGH / len(some))
        return chain.from_iterable(islice(self.read(part), num) for part in some)

    def _with_captions(self, found: Record | BrokenSample) -> Record | BrokenSample:
        """Return the sample with the captions of ``prepare.captions``; its own becomes the first that is not empty."""
        columns = [caption.column for caption in self.config.captions]
        if isinstance(found, BrokenSample) or not columns:
            return found

        captions = list[str]()
        for column in columns:
            caption = caption_in(found.values[column], found.key)
            if isinstance(caption, BrokenSample):
                return caption

            captions.append(caption)

        return replace(found, captions=tuple(captions), caption=next(filter(None, captions), ""))

    def provenance(self) -> dict[str, dict[str, str]]:
        """Return the origin of each network's weights; may load them."""
        return {name: plugin.provenance() for name, plugin in self._encoders().items()}


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

    def chunks(self) -> Iterator[tuple[list[Record], Images]]:
        """Yield up to ``IMAGES_AT_ONCE`` samples and their square images.

        Raises:
            UserError: the source breaks its contract, or images differ in size and no size is set.
        """
        samples = self._samples()
        while chunk := list(islice(samples, IMAGES_AT_ONCE)):
            self.num_rows += len(chunk)
            yield [record for record, _ in chunk], np.stack([image for _, image in chunk])

    def _samples(self) -> Iterator[tuple[Record, Pixels]]:
        for found in self.found:
            self.num_read += 1
            if isinstance(found, Record):
                self._check(found)

            record = self._kept(found)
            if record is None:
                continue

            image = self._square(record)
            self.content.update(repr(vars(record) | {"image": image.shape}).encode())
            self.content.update(image.tobytes())
            self.image_size = self.image_size or len(image)
            if len(image) != self.image_size:
                others = f"{self.image_size} x {self.image_size}"
                raise self._error(record, f"has {_size(image)} pixels, others have {others}", _SET_SIZE)

            yield record, image

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

        values = {**found.values, **properties(found.image, self.config.images)}
        if cause := self.plugins.filters.cause(found.key, values):
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

    def _square(self, record: Record) -> Pixels:
        image = record.image
        size = self.config.images.size
        if size is not None:
            return to_square(image, size, self.config.images.aspect)
        if image.shape[0] != image.shape[1]:
            raise self._error(record, f"has {_size(image)} pixels and is not square", _SET_SIZE)

        return image

    def _error(self, record: Record, problem: str, remedy: str = _FIX) -> UserError:
        return UserError(f"source {self.config.source.name!r}: sample {record.key!r} {problem}; {remedy}")


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


def to_square(image: Pixels, size: int, aspect: str) -> Pixels:
    """Resize an image to ``size`` × ``size`` pixels (Lanczos).

    Args:
        image: RGB.
        size: height and width of the result.
        aspect: ``crop`` keeps the middle of the longer side, as ADM and DiT do; ``pad`` keeps the whole image, on
            white; ``stretch`` keeps the whole image and changes its proportions.
    """
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image

    whole = Image.fromarray(image)
    lanczos = Image.Resampling.LANCZOS
    if aspect == "crop":
        return np.asarray(ImageOps.fit(whole, (size, size), lanczos))
    if aspect == "stretch":
        return np.asarray(whole.resize((size, size), lanczos))

    longer = max(height, width)
    inner = (max(1, round(width * size / longer)), max(1, round(height * size / longer)))
    sheet = Image.new("RGB", (size, size), "white")
    sheet.paste(whole.resize(inner, lanczos), ((size - inner[0]) // 2, (size - inner[1]) // 2))
    return np.asarray(sheet)


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
