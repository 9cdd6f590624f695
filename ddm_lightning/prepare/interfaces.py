"""What the plug-ins of ``prepare`` have to offer.

Each is built from its name and plain parameters. Building one has to be cheap and to raise ``UserError``
when a package is missing (``packages.require``), because all are built before anything is written; weights
are loaded on first use. ``packages`` names the distributions whose version shapes the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from ddm_lightning.prepare.records import Record


@runtime_checkable
class Source(Protocol):
    """A data set of pictures of one size."""

    packages: tuple[str, ...]
    attribution: str
    """Credit that the licence asks for, printed on pictures and kept in the manifest; empty for none."""
    num_classes: int
    """Labels run from 0 to this minus 1; 1 when the data set has none."""

    def __len__(self) -> int:
        """Samples."""
        ...

    def __iter__(self) -> Iterator[Record]:
        """The samples, in the same order each time."""
        ...


@runtime_checkable
class ImageEncoder(Protocol):
    """What turns pictures into the tensors that the experts model, and back.

    ``encode`` gives what the shards store, as ``dtype``; the experts model
    ``x_0 = (stored - shift) * scale`` in float32, with both from ``normalisation``.
    """

    packages: tuple[str, ...]
    dtype: str
    """NumPy name of the stored numbers."""
    normalisation: dict[str, float]
    """``scale`` and ``shift``."""

    def x_shape(self, image_size: int) -> tuple[int, int, int]:
        """Channels, height and width of ``x_0`` for square pictures of ``image_size`` pixels."""
        ...

    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Shaped[np.ndarray, "n c height width"]:
        """Pictures to stored tensors."""
        ...

    def decode(self, x_0: Float[Tensor, "n c height width"]) -> UInt8[np.ndarray, "n h w 3"]:
        """``x_0`` to pictures."""
        ...


@runtime_checkable
class CaptionEncoder(Protocol):
    """What turns a caption into one vector of unit variance per entry: L2 norm sqrt(size)."""

    packages: tuple[str, ...]
    size: int

    def encode(self, captions: Sequence[str]) -> Float[np.ndarray, "n size"]:
        """Captions to vectors, float32."""
        ...


@runtime_checkable
class Features(Protocol):
    """What turns a picture into the vector by which it is clustered."""

    packages: tuple[str, ...]
    size: int

    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Pictures to vectors, float32."""
        ...
