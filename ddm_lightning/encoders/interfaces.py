"""Interfaces of encoders and feature networks.

Each is built from its name and plain parameters, in several processes at once. Building one has to be cheap and
to raise ``UserError`` when a package or a path is missing (``packages.require``), because all are built before
anything is written; weights are loaded on first use. ``packages`` names the distributions whose version shapes
the result. The same input has to give the same bytes, in whatever process and order parts are worked on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor


@runtime_checkable
class ImageEncoder(Protocol):
    """What turns pictures into the tensors that the experts model, and back.

    ``encode`` gives what the shards store, as ``dtype``. With ``stores = "x_0"`` the experts model
    ``x_0 = (stored - shift) * scale`` in float32; with ``stores = "posterior"`` the stored channels are the
    mean, then the standard deviation, of a Gaussian from which ``stored`` is drawn anew at each step.
    """

    packages: tuple[str, ...]
    dtype: str
    """NumPy name of the stored numbers."""
    stores: str
    """``x_0`` ([n c h w] is stored) or ``posterior`` ([n 2c h w])."""
    normalisation: dict[str, float | list[float]]
    """``scale`` and ``shift``, a number or one a channel."""

    def provenance(self) -> dict[str, str]:
        """Where weights come from, for the manifest: ``weights_sha256``, ``revision``; empty without weights."""
        ...

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
    """What turns captions into what the shards store of them, and into one vector of unit variance per entry.

    The vector (L2 norm about sqrt(size)) is what pooled-text networks are conditioned on. An encoder whose
    ``columns`` hold ``text`` stores that vector; one that stores token ids computes it while training.
    """

    packages: tuple[str, ...]
    size: int
    """Entries of the vector."""
    token_shape: tuple[int, int] | None
    """Tokens of a caption and entries of each, where the shards hold what gives them; None where they do not."""
    columns: dict[str, str]
    """Column -> MDS encoding of what ``encode`` gives, such as ``{"text": "ndarray:float16:512"}``; names begin
    with ``text``."""

    def provenance(self) -> dict[str, str]:
        """Where weights come from, for the manifest: ``weights_sha256``, ``revision``; empty without weights."""
        ...

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Captions, of any length and script, to one row of each column a caption."""
        ...

    def vectors(self, captions: Sequence[str]) -> Float[np.ndarray, "n size"]:
        """Captions to vectors, float32: what a prompt is conditioned on."""
        ...

    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n size"]:
        """Rows of the columns, on any device, to vectors there, float32; ``stored["text"]`` where that is stored."""
        ...

    def tokens(self, captions: Sequence[str]) -> Float[np.ndarray, "n m width"]:
        """Captions to a vector a token, float32, zero behind a caption's end; only with a ``token_shape``."""
        ...

    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> Float[Tensor, "n m width"]:
        """Rows of the columns, on any device, to ``tokens`` there; only with a ``token_shape``."""
        ...


@runtime_checkable
class Features(Protocol):
    """What turns a picture into the vector by which it is clustered."""

    packages: tuple[str, ...]
    size: int

    def provenance(self) -> dict[str, str]:
        """Where weights come from, for the manifest: ``weights_sha256``, ``revision``; empty without weights."""
        ...

    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Pictures to vectors, float32."""
        ...


_NUMBER_TYPES = (
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)


def array_encoding(dtype: str, shape: Sequence[int]) -> str:
    """The MDS encoding of arrays of one type and shape, such as ``ndarray:float16:77,768``."""
    return f"ndarray:{dtype}:{','.join(map(str, shape))}"


def bytes_per_sample(columns: Mapping[str, str]) -> int:
    """Bytes that one sample of ``columns`` (name -> MDS encoding) takes before compression.

    Raises:
        ValueError: an encoding whose size differs from sample to sample.
    """
    return sum(_size(name, encoding) for name, encoding in columns.items())


def _size(name: str, encoding: str) -> int:
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind in _NUMBER_TYPES and not rest:
        return np.dtype(kind).itemsize
    if kind == "ndarray" and dtype in _NUMBER_TYPES and shape:
        return np.dtype(dtype).itemsize * prod(map(int, shape.split(",")))
    raise ValueError(f"column {name!r}: samples encoded as {encoding!r} have no fixed size")
