"""What a source yields."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8


@dataclass(frozen=True)
class Record:
    """One sample of a data set before any encoding."""

    key: str
    """Name of the sample that stays the same when others are added or removed; it decides what is held out."""
    image: UInt8[np.ndarray, "h w 3"]
    """RGB picture."""
    caption: str
    """What the picture shows; empty when nobody said."""
    label: int
    """Class, from 0 to the source's ``num_classes`` - 1."""
