"""The plug-ins of ``prepare``: the source, encoders, feature network and filters of an experiment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from itertools import chain, islice
from typing import Any

from ddm_lightning.config.experiment import ImagesConfig, PrepareConfig
from ddm_lightning.core.buckets import Bucket, Size, bucket_sizes, nearest
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES
from ddm_lightning.encoders.interfaces import (
    CaptionEncoder,
    Features,
    ImageEncoder,
    array_encoding,
    bytes_per_sample,
    numbered,
    shape_of,
)
from ddm_lightning.prepare.filters import (
    PROPERTIES,
    Filters,
    extra_columns,
)
from ddm_lightning.prepare.records import BrokenSample, Part, Record, Source
from ddm_lightning.prepare.sources.decode import caption_in
from ddm_lightning.shards.manifest import DataSizes

ENOUGH = 1000
"""Samples to read before a judgement on all."""
_PARTS_TO_LOOK_AT = 20
_OVER_TARGET = 2  # below, what a JPEG's decoder leaves out would show after Lanczos
_COMMON_PACKAGES = ("ddm_lightning", "torch", "numpy", "pillow", "mosaicml-streaming")


def num_captions(config: PrepareConfig) -> int:
    """Return the number of captions of each sample."""
    return max(1, len(config.captions))


def inputs_of_images(config: ImagesConfig) -> dict[str, Any]:
    """Return what shapes the images, as JSON; without newer keys at their defaults, so that old hashes hold."""
    inputs: dict[str, Any] = {"size": config.size, "aspect": config.aspect}
    if sizes := bucket_sizes(config.buckets, config.size or 0):
        inputs["buckets"] = [*map(list, sizes)]
    if not config.upscale:
        inputs["upscale"] = False
    if config.reduce and config.size is not None:
        inputs["reduce"] = "whole pixels"

    return inputs


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

        if hasattr(source, "least_size"):
            source.least_size = self.least_size

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
        """Build every plug-in, filters and buckets; return the versions of all packages that shape the result."""
        _ = self.filters, self.buckets
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

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Shapes of the images; none for one square.

        Raises:
            UserError: the encoder cannot encode one of them, or not in its proportions.
        """
        images = self.config.images
        encoder = self.image_encoder
        buckets = []
        for height, width in bucket_sizes(images.buckets, images.size or 0):
            try:
                shape = shape_of(encoder, height, width)
            except UserError as error:
                problem = str(error).partition(";")[0]
                raise UserError(f"key 'prepare.images.buckets': {height} x {width}: {problem}; change it") from None

            buckets.append(Bucket(height, width, shape))

        if len({bucket.x_shape for bucket in buckets}) < len(buckets):
            raise UserError(
                f"image encoder {self.config.image_encoder.name!r}: encodes several of prepare.images.buckets in one "
                "shape; remove its parameter 'image_size'"
            )

        return tuple(buckets)

    def target(self, size: Size) -> tuple[int, Size | None]:
        """Return the number of an image's bucket, and its size after resizing; None if images keep theirs."""
        side = self.config.images.size
        if sizes := [bucket.size for bucket in self.buckets]:
            number = nearest(sizes, *size)
            return number, sizes[number]
        if side is None:
            return 0, None

        return 0, (side, side)

    def least_size(self, size: Size) -> Size:
        """Return the height and width that an image of this size keeps at least when it is decoded."""
        side = self.config.images.size
        if side is None or not self.config.images.reduce:
            return size

        height, width = self.target(size)[1] or size
        return _OVER_TARGET * max(height, side), _OVER_TARGET * max(width, side)

    @property
    def bucket_names(self) -> list[str | None]:
        """Names of the buckets; a single None without buckets."""
        return [bucket.name for bucket in self.buckets] or [None]

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

        x_shape = self.image_encoder.x_shape(image_size)
        return DataSizes(x_shape, text_size, token_shape, self.source.num_classes, self.buckets)

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

    def stored_shape(self, x_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in which the shards store an ``x_0``."""
        channels, *rest = x_shape
        if self.image_encoder.stores == "posterior":  # mean and std
            channels *= 2

        return (channels, *rest)

    def sample_bytes(self, sizes: DataSizes) -> int:
        """Return the uncompressed bytes of a sample in the shards, the largest, without the texts of its captions."""
        shapes = [bucket.x_shape for bucket in sizes.buckets] or [sizes.x_shape]
        return max(bytes_per_sample(self.encodings(self.stored_shape(shape))) for shape in shapes)

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
