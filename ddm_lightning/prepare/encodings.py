"""MDS encodings of fixed size: how a column is declared, and what a sample of it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


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
    if kind in _SCALARS and not rest:
        return np.dtype(kind).itemsize
    if kind == "ndarray" and dtype in _SCALARS and shape:
        return np.dtype(dtype).itemsize * prod(map(int, shape.split(",")))
    raise ValueError(f"column {name!r}: samples encoded as {encoding!r} have no fixed size")
