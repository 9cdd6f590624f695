"""Conditions of a velocity field: per row a pooled text vector, text tokens, a class, or the learned null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

KINDS = ("text", "tokens", "class", "none")


@dataclass(frozen=True)
class ConditionSpec:
    """Kind and size of a network's condition, as recorded in artifacts.

    Raises:
        ValueError: unknown ``kind``, or a ``size`` or ``length`` that does not fit it or is no whole number.
    """

    kind: str
    """``text``, ``tokens``, ``class`` or ``none``."""
    size: int
    """Entries of the text vector or of one text token, or number of classes; 0 for ``none``."""
    length: int = 0
    """Text tokens per row; 0 for the other kinds."""

    def __post_init__(self) -> None:
        numbers = ((self.size, self.kind != "none"), (self.length, self.kind == "tokens"))
        # Compared by ``type``, because JSON's true is an int to isinstance.
        fits = all(type(number) is int and number >= 0 and (number > 0) == needed for number, needed in numbers)
        if self.kind not in KINDS or not fits:
            raise ValueError(
                f"a condition of kind {self.kind!r} with size {self.size!r} and length {self.length!r}: kinds are "
                f"{', '.join(KINDS)}; all but none have a size of at least 1, and tokens alone a length of at least 1"
            )

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row's value: () for a class, otherwise (size,), or (length, size) for tokens."""
        if self.kind == "class":
            return ()
        return (self.length, self.size) if self.kind == "tokens" else (self.size,)

    def to_dict(self) -> dict[str, Any]:
        """Arguments of the constructor as JSON values; ``length`` for ``tokens`` only."""
        return {"kind": self.kind, "size": self.size} | ({"length": self.length} if self.length else {})


# Tensors have no truth value, so a generated __eq__ would raise.
@dataclass(frozen=True, eq=False)
class Condition:
    """One condition per row. ``None`` may replace it for a fully unconditional batch."""

    values: Float[Tensor, "b size"] | Float[Tensor, "b m size"] | Int[Tensor, " b"]
    """Text vectors, text tokens, or classes (int64)."""
    keep: Bool[Tensor, " b"]
    """False where the network's learned null replaces the value."""

    @classmethod
    def of(cls, values: Float[Tensor, "b size"] | Float[Tensor, "b m size"] | Int[Tensor, " b"]) -> Condition:
        """A condition that keeps all rows."""
        return cls(values, torch.ones(len(values), dtype=torch.bool, device=values.device))

    @classmethod
    def cat(cls, conditions: Sequence[Condition]) -> Condition:
        """The rows of all ``conditions``, in order."""
        return cls(torch.cat([c.values for c in conditions]), torch.cat([c.keep for c in conditions]))

    def dropped(self, mask: Bool[Tensor, " b"]) -> Condition:
        """Set the rows in ``mask`` to null; null rows stay null."""
        return Condition(self.values, self.keep & ~mask)

    def null(self) -> Condition:
        """Every row null, for the unconditional branch of guidance (Ho and Salimans, 2207.12598)."""
        return Condition(self.values, torch.zeros_like(self.keep))

    def rows(self, index: Int[Tensor, " n"] | Bool[Tensor, " b"] | slice) -> Condition:
        """The chosen rows, in the order of ``index``."""
        return Condition(self.values[index], self.keep[index])

    def to(self, device: torch.device | str) -> Condition:
        """The same condition on ``device``."""
        return Condition(self.values.to(device), self.keep.to(device))
