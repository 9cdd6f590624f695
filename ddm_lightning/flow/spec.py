"""What artifacts record of a network: its condition, path, prediction and shift of times; without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("text", "tokens", "tokens+text", "class", "none")
PATH_NAMES = ("linear", "cosine", "vp")
"""Names of ``flow.path.PATHS``."""
PREDICTIONS = ("velocity", "epsilon", "x_0")
"""Prediction types of networks."""


@dataclass(frozen=True)
class ConditionSpec:
    """Kind and size of a network's condition, as recorded in artifacts.

    Raises:
        ValueError: unknown ``kind``, or a number that does not fit it.
    """

    kind: str
    """``text``, ``tokens``, ``tokens+text``, ``class`` or ``none``."""
    size: int
    """Entries of one text token, else of the text vector, or number of classes; 0 for ``none``."""
    length: int = 0
    """Text tokens per row; 0 for kinds without tokens."""
    vector_size: int = 0
    """Entries of the text vector of ``tokens+text``; 0 for the other kinds."""

    def __post_init__(self) -> None:
        has_size = self.kind != "none"
        has_tokens = self.kind in ("tokens", "tokens+text")
        has_vector = self.kind == "tokens+text"
        fits = (self.size > 0, self.length > 0, self.vector_size > 0) == (has_size, has_tokens, has_vector)
        if self.kind not in KINDS or not fits or min(self.size, self.length, self.vector_size) < 0:
            raise ValueError(
                f"a condition of kind {self.kind!r} with size {self.size!r}, length {self.length!r} and vector_size "
                f"{self.vector_size!r}: kinds are {', '.join(KINDS)}; all but none have a size of at least 1, those "
                "with tokens a length of at least 1, and tokens+text alone a vector_size of at least 1"
            )

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row's value: () for a class, otherwise (size,), or (length, size) for tokens."""
        if self.kind == "class":
            return ()
        if self.length:
            return (self.length, self.size)

        return (self.size,)

    @property
    def pooled(self) -> ConditionSpec:
        """Spec of ``Condition.pooled``."""
        if self.vector_size:
            return ConditionSpec("text", self.vector_size)

        return self


def shift_for(shape: Sequence[int], x_shape: Sequence[int], shift: float, by_tokens: bool) -> float:
    """Return the shift for samples of a shape; both shapes end with height and width.

    ``by_tokens`` multiplies the ``shift`` for ``x_shape`` by the root of the number of tokens over that of ``x_shape``
    (SD3, 2403.03206, eq. 23): the noise of more cells hides less of an image.
    """
    if not by_tokens:
        return shift

    return shift * math.sqrt(math.prod(shape[-2:]) / math.prod(x_shape[-2:]))
