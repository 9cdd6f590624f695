"""Interfaces of encoders and feature networks, and the form in which encoded images are stored.

Each is built from its name and plain parameters, in several processes at once. All are built before anything is
written, so building must be cheap and must raise ``UserError`` when a package or a path is missing
(``registry.require``); load weights on first use. The same input must give the same bytes in any process and order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from ddm_lightning.flow.path import expand_rows

Images: TypeAlias = UInt8[np.ndarray, "n h w 3"]
Vectors: TypeAlias = Float[np.ndarray, "n size"]
TokenVectors: TypeAlias = Float[np.ndarray, "n m width"]
TextVectors: TypeAlias = Float[Tensor, "n size"]
"""``Vectors`` of captions as tensors, as training needs them."""
TextTokens: TypeAlias = Float[Tensor, "n m width"]
"""``TokenVectors`` as tensors."""


class Provenance(Protocol):
    """Names the packages and weights that affect the result; by default none."""

    packages: tuple[str, ...] = ()
    """Distributions whose versions affect the result."""

    def provenance(self) -> dict[str, str]:
        """Return ``weights_sha256`` and ``revision`` for the manifest; empty without weights."""
        return {}


@runtime_checkable
class ImageEncoder(Provenance, Protocol):
    """Images to the tensors that the experts model, and back.

    ``encode`` returns the stored tensors, as ``dtype``. With ``stores = "x_0"`` the experts model
    ``x_0 = (stored - shift) * scale`` in float32; with ``stores = "posterior"`` the stored channels are the
    mean, then the standard deviation, of a Gaussian; each step samples ``stored`` from it anew.
    """

    dtype: str
    """NumPy type of the stored numbers."""
    stores: str
    """``x_0`` ([n c h w] is stored) or ``posterior`` ([n 2c h w])."""
    normalisation: dict[str, float | list[float]]
    """``scale`` and ``shift``, one number each or one per channel."""

    def x_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of ``x_0`` for square images of ``image_size`` pixels."""

    def encode(self, images: Images) -> Shaped[np.ndarray, "n c height width"]:
        """Encode images to stored tensors."""

    def decode(self, x_0: Float[Tensor, "n c height width"]) -> Images:
        """Decode ``x_0`` to images."""


def shape_of(encoder: ImageEncoder, height: int, width: int) -> tuple[int, int, int]:
    """Return channels, height and width of ``x_0`` for images of ``height`` x ``width`` pixels.

    Raises:
        UserError: the encoder takes no such images.
    """
    channels, rows, _ = encoder.x_shape(height)
    return channels, rows, encoder.x_shape(width)[2]


class StoredForm:
    """How ``x_0`` is stored: as itself or as a Gaussian to sample from, and in which units.

    ``x_0 = (stored - shift) * scale`` in float32. A ``posterior`` holds means, then standard deviations, in twice the
    channels, as returned by a variational autoencoder (Kingma and Welling, arXiv 1312.6114).

    Args:
        stores: ``x_0`` or ``posterior``.
        normalisation: ``scale`` and ``shift``, one number each or one per channel.
    """

    def __init__(self, stores: str, normalisation: Mapping[str, float | list[float]]) -> None:
        self.stores = stores
        self._scale = tuple(np.ravel(normalisation["scale"]).tolist())
        self._shift = tuple(np.ravel(normalisation["shift"]).tolist())

    def mean(self, stored: Shaped[Tensor, "b s h w"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "b c h w"]:
        """Return ``x_0`` or its mean."""
        shift = _per_channel(self._shift, stored.device, dtype)
        scale = _per_channel(self._scale, stored.device, dtype)
        if self.stores == "posterior":
            stored = stored[:, : stored.shape[1] // 2]

        return (stored.to(dtype) - shift) * scale

    def std(
        self, stored: Shaped[Tensor, "b s h w"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "b c h w"] | None:
        """Return the standard deviation of ``x_0``; None if ``x_0`` itself is stored."""
        if self.stores != "posterior":
            return None

        return stored[:, stored.shape[1] // 2 :].to(dtype) * _per_channel(self._scale, stored.device, dtype).abs()

    def sample(self, stored: Shaped[Tensor, "b s h w"], generator: torch.Generator) -> Float[Tensor, "b c h w"]:
        """Sample ``x_0`` from its Gaussian; return a stored ``x_0`` unchanged."""
        mean = self.mean(stored)
        std = self.std(stored)
        if std is None:
            return mean

        return mean + std * torch.randn(mean.shape, generator=generator, device=mean.device)


@cache
def _per_channel(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Float[Tensor, "c 1 1"]:
    """``values`` as a tensor; cached, because a new one at each step would synchronise with the device."""
    return torch.tensor(values, dtype=dtype).reshape(-1, 1, 1).to(device)


def numbered(name: str, number: int) -> str:
    """Return a column's name for an image's caption ``number``, from 0: ``text``, ``text_2``, ``text_3`` …"""
    if number:
        return f"{name}_{number + 1}"

    return name


def draw_caption(
    batch: Mapping[str, Tensor], weights: Sequence[float], uniform: Float[Tensor, " b"]
) -> dict[str, Tensor]:
    """Choose one of several captions for each image; return the batch with that one's columns as ``text…``.

    The column ``has_caption`` [b n] tells which of the n captions an image has. Only these are chosen; the
    columns of the others hold the image's first caption.

    Args:
        batch: columns of the shards.
        weights: weight of each caption; an image's captions are chosen in proportion to their weights.
        uniform: random numbers in [0, 1).
    """
    weights_here = [batch["has_caption"][:, number] * weight for number, weight in enumerate(weights)]
    ends = torch.stack(weights_here, 1).cumsum(1)
    chosen = (ends <= uniform[:, None] * ends[:, -1:]).sum(1)
    drawn = dict(batch)
    for number in range(1, len(weights)):
        for name in batch:
            other = batch.get(numbered(name, number))
            if name.startswith("text") and other is not None:
                drawn[name] = torch.where(expand_rows(chosen == number, other), other, drawn[name])

    return drawn


@runtime_checkable
class CaptionEncoder(Provenance, Protocol):
    """Captions to the columns that the shards store, and to one vector with entries of unit variance.

    The vector (L2 norm about sqrt(size)) conditions pooled-text networks. An encoder whose ``columns`` hold ``text``
    stores that vector; one that stores token ids computes it during training.
    """

    size: int
    """Entries of the vector."""
    token_shape: tuple[int, int] | None
    """Tokens per caption and entries of each; None if the shards hold no tokens."""
    columns: dict[str, str]
    """Column -> MDS encoding, such as ``{"text": "ndarray:float16:512"}``; names begin with ``text``."""

    def encode(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """Encode captions of any length and script to one row per column and caption."""

    def vectors(self, captions: Sequence[str]) -> Vectors:
        """Encode captions or prompts to vectors, float32."""

    def vectors_of_stored(self, stored: Mapping[str, Tensor]) -> TextVectors:
        """Turn stored columns, on any device, into vectors there, float32; ``stored["text"]`` if it is stored."""

    def tokens(self, captions: Sequence[str]) -> TokenVectors:
        """Encode captions to one vector per token, float32, zero after the end; needs a ``token_shape``."""

    def tokens_of_stored(self, stored: Mapping[str, Tensor]) -> TextTokens:
        """Turn stored columns, on any device, into ``tokens`` there; needs a ``token_shape``."""


@runtime_checkable
class Features(Provenance, Protocol):
    """Images to the vectors by which they are clustered."""

    size: int

    def encode(self, images: Images) -> Vectors:
        """Encode images to vectors, float32."""


_NUMBER = r"u?int(?:8|16|32|64)|float(?:16|32|64)"
_ENCODING = re.compile(rf"ndarray:({_NUMBER}):([1-9]\d*(?:,[1-9]\d*)*)|(int|{_NUMBER})")


def array_encoding(dtype: str, shape: Sequence[int]) -> str:
    """Return the MDS encoding of arrays of one type and shape, such as ``ndarray:float16:77,768``."""
    return f"ndarray:{dtype}:{','.join(map(str, shape))}"


def parse_encoding(encoding: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Return the type and shape of one value of a fixed-size column, from its MDS encoding.

    Raises:
        ValueError: the encoding has no fixed size, or does not hold numbers.
    """
    found = _ENCODING.fullmatch(encoding)
    if found is None:
        raise ValueError(f"{encoding!r} has no fixed size, or does not hold numbers")

    array, shape, scalar = found.groups()
    if scalar:
        return np.dtype(scalar), ()

    return np.dtype(array), tuple(map(int, shape.split(",")))


def bytes_per_sample(columns: Mapping[str, str]) -> int:
    """Return the uncompressed bytes of one sample of ``columns`` (name -> MDS encoding).

    Raises:
        ValueError: an encoding without a fixed size.
    """
    num_bytes = 0
    for encoding in columns.values():
        dtype, shape = parse_encoding(encoding)
        num_bytes += dtype.itemsize * prod(shape)

    return num_bytes
