"""Near-duplicates: images whose features point in almost the same direction, found without comparing all pairs.

An image has a code of 256 bits, the signs of fixed random projections of its features. Of two codes, a share of
angle / pi of the bits differs on average (Charikar, "Similarity estimation techniques from rounding algorithms",
2002, section 3). So most near-duplicates are neighbours once codes are sorted; those that differ in a leading bit are
neighbours in an order that begins with other bits.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Bool, Float, UInt64

_NUM_BITS = 256
_NUM_ORDERS = _NUM_BITS // 16
_NUM_NEIGHBOURS = 4
_ROWS_AT_ONCE = 1 << 20


def codes_of(features: Float[np.ndarray, "n d"]) -> UInt64[np.ndarray, "n 4"]:
    """Return the code of each image; the same for every part, machine and run."""
    directions = np.random.default_rng(0).standard_normal((features.shape[1], _NUM_BITS), np.float32)
    return np.packbits(features.astype(np.float32) @ directions > 0, axis=1).view(np.uint64)


def find_near_duplicates(codes: UInt64[np.ndarray, "n 4"], similarity: float) -> Bool[np.ndarray, "n"]:
    """Find the images that are like an earlier one.

    Args:
        codes: from ``codes_of``.
        similarity: smallest cosine of the angle between the features of two near-duplicates, as the codes estimate it.
    """
    most_bits = _NUM_BITS * math.acos(similarity) / math.pi
    found = np.zeros(len(codes), bool)
    pieces = codes.view(np.uint16).T
    for first in range(_NUM_ORDERS):
        leading = (pieces[first].astype(np.uint32) << 16) | pieces[first - 1]
        order = leading.argsort(kind="stable")
        for start in range(0, len(order), _ROWS_AT_ONCE):
            rows = order[start : start + _ROWS_AT_ONCE + _NUM_NEIGHBOURS]
            sorted_codes = codes[rows]
            for step in range(1, _NUM_NEIGHBOURS + 1):
                num_bits = np.bitwise_count(sorted_codes[step:] ^ sorted_codes[:-step]).sum(1)
                near = num_bits <= most_bits
                found[np.maximum(rows[step:], rows[:-step])[near]] = True

    return found
