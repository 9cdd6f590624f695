"""What a source yields, and in which pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt8


@dataclass(frozen=True)
class Record:
    """One sample of a data set before any encoding."""

    key: str
    """Name of the sample that stays the same when others are added or removed; it decides what is held out."""
    image: UInt8[np.ndarray, "h w 3"]
    """RGB picture of any size."""
    caption: str | Broken
    """What the picture shows; empty if unknown; ``Broken`` if unreadable: a broken sample if captions are used."""
    label: int
    """Class, from 0 to the source's ``num_classes`` - 1."""
    group: str | None = None
    """Samples of one group are held out together (tiles that overlap, frames of one film); None: by ``key`` alone."""


@dataclass(frozen=True)
class Broken:
    """A sample that cannot be used: counted by cause, listed in ``prepared/broken.jsonl``, and left out."""

    key: str
    """Its name, as near as it is known: a key, or the file that it is in."""
    cause: str
    """A few words that many samples share ("empty file", "truncated picture"), by which they are counted."""
    detail: str = ""
    """One line more, of this sample alone."""


@dataclass(frozen=True)
class Part:
    """A piece of a source that can be read on its own: a tar, a row group, a block of files.

    What is prepared of a part is kept until its ``fingerprint`` or the configuration changes, so parts
    should be small enough to do again (thousands of samples) and their names should not depend on other parts.
    """

    name: str
    """Unique in the source, the same at each call."""
    fingerprint: str
    """Changes when the part's content may have changed: sizes and times, an ETag, a version."""
    num_samples: int | None
    """Samples in it, broken ones included; None when only reading tells."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """What ``read`` needs to find it again in another process: plain JSON."""


@runtime_checkable
class Source(Protocol):
    """A data set of captioned pictures, in parts.

    A source that knows the names of its classes lists them as ``class_names``.
    """

    packages: tuple[str, ...]
    attribution: str
    """Credit that the licence asks for, printed on pictures and kept in the manifest; empty for none."""
    num_classes: int
    """Labels run from 0 to this minus 1; 1 when the data set has none."""

    def parts(self) -> Sequence[Part]:
        """The parts, in the same order each time. Lists files; opens no sample."""
        ...

    def read(self, part: Part) -> Iterator[Record | Broken]:
        """Every sample of one part, in the same order each time; what cannot be read comes as ``Broken``."""
        ...
