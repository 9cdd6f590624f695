"""The contract of sources: records, broken samples, parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import UInt8

from ddm_lightning.core.buckets import Size

Pixels: TypeAlias = UInt8[np.ndarray, "h w 3"]
"""RGB image of any size."""


@dataclass(frozen=True)
class Record:
    """One sample of a data set before any encoding."""

    key: str
    """Unique name, independent of other samples; decides whether the sample is held out."""
    image: Pixels
    """RGB image of any size."""
    caption: str
    """Caption; empty if unknown."""
    label: int
    """Class, from 0 to the source's ``num_classes`` - 1."""
    group: str | None = None
    """Samples of one group are held out together (overlapping tiles, frames of a film); None for no group."""
    captions: tuple[str, ...] = ()
    """Set by ``prepare``: one caption per entry of ``prepare.captions``, empty if the sample has none."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the source's ``extra_columns``."""
    full_size: Size | None = None
    """Height and width of an image that was decoded at 1/2, 1/4 or 1/8 of them, rounded up; None for those of
    ``image``."""

    @property
    def size(self) -> Size:
        """Height and width of the whole image, in pixels."""
        return self.full_size or self.image.shape[:2]


@dataclass(frozen=True)
class BrokenSample:
    """An unusable sample: counted by cause, listed in ``prepared/broken.jsonl``, and skipped."""

    key: str
    """Its key, or else the name of its file."""
    cause: str
    """A few words shared by many samples ("empty file", "damaged image")."""
    detail: str = ""
    """One line about this sample alone."""


@dataclass(frozen=True)
class Part:
    """A piece of a source that can be read alone: a tar, a row group, a block of files.

    An encoded part is kept until its ``fingerprint`` or the configuration changes. So parts should be small enough to
    encode again (thousands of samples), and their names should not depend on other parts.
    """

    name: str
    """Unique in the source; the same at each call."""
    fingerprint: str
    """Changes when the content may have changed: sizes and times, an ETag, a version."""
    num_samples: int | None
    """Number of samples, broken ones included; None if unknown before reading."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON with which ``read`` finds the part in another process."""


# Every part costs some files, so that a large source has larger ones.
BLOCK_SIZE = 512
LARGE_BLOCK_SIZE = 10_240
LARGE_SOURCE = 1_000_000


def block_size_of(num_samples: int) -> int:
    """Return the number of samples of a part, for a source of ``num_samples``."""
    if num_samples >= LARGE_SOURCE:
        return LARGE_BLOCK_SIZE

    return BLOCK_SIZE


def block_parts(
    num_samples: int, fingerprint: str, prefix: str = "block", num_in_source: int | None = None, **where: Any
) -> list[Part]:
    """Divide samples 0 to ``num_samples`` - 1 into blocks of the same size, the last one shorter.

    A block is named ``<prefix>-<number of its first sample>``, so a set that grows at its end keeps its parts.

    Args:
        num_samples: number of samples.
        fingerprint: common to all samples, such as a version.
        prefix: of the names.
        num_in_source: samples of the whole source, which decide the size of a block; None for ``num_samples``.
        **where: for ``Part.where``.
    """
    parts = []
    size = block_size_of(num_samples if num_in_source is None else num_in_source)
    for start in range(0, num_samples, size):
        stop = min(start + size, num_samples)
        parts.append(
            Part(
                f"{prefix}-{start:09}",
                f"{fingerprint}; samples {start} to {stop}",
                stop - start,
                {"start": start, "stop": stop, **where},
            )
        )

    return parts


def block_of(part: Part) -> range:
    """Return the sample numbers of a part of ``block_parts``."""
    return range(part.where["start"], part.where["stop"])


def count_samples(parts: Iterable[Part]) -> int | None:
    """Add up the samples of parts, broken ones included; None if a part does not know."""
    total = 0
    for part in parts:
        if part.num_samples is None:
            return None

        total += part.num_samples

    return total


@runtime_checkable
class Source(Protocol):
    """A data set of captioned images, in parts.

    Optional: ``class_names``, the names of its classes; and, for a source with columns, ``extra_columns``, a dict that
    ``prepare`` fills before it lists the parts: columns to read into ``Record.values`` -> key that asks for each. Also
    optional: ``least_size``, which ``prepare`` sets to a function from the height and width of an image to those that
    it keeps at least when it is decoded (see ``sources/decode.py``).
    """

    packages: tuple[str, ...]
    """Distributions whose versions shape the samples."""
    attribution: str
    """Credit required by the licence, printed on images and kept in the manifest; empty for none."""
    num_classes: int
    """Labels run from 0 to this minus 1; 1 without labels."""

    def parts(self) -> Sequence[Part]:
        """List the parts in a fixed order without opening samples."""

    def read(self, part: Part) -> Iterator[Record | BrokenSample]:
        """Yield every sample of one part in a fixed order; unreadable ones as ``BrokenSample``."""
