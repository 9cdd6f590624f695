"""Conditions of a velocity field: per row a pooled text vector, text tokens, both, a class, or the learned null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


# Tensors have no truth value, so a generated __eq__ would raise.
@dataclass(frozen=True, eq=False)
class Condition:
    """One condition per row. ``None`` may replace it for a fully unconditional batch."""

    values: Float[Tensor, "b size"] | Float[Tensor, "b m size"] | Int[Tensor, " b"]
    """Text vectors, text tokens, or classes (int64)."""
    keep: Bool[Tensor, " b"]
    """False where the network's learned null replaces the value."""
    vectors: Float[Tensor, "b vector_size"] | None = None
    """Text vectors beside text tokens; None for other kinds than ``tokens+text``."""

    @classmethod
    def of(
        cls,
        values: Float[Tensor, "b size"] | Float[Tensor, "b m size"] | Int[Tensor, " b"],
        vectors: Float[Tensor, "b vector_size"] | None = None,
    ) -> Condition:
        """A condition that keeps all rows."""
        return cls(values, torch.ones(len(values), dtype=torch.bool, device=values.device), vectors)

    @classmethod
    def cat(cls, conditions: Sequence[Condition]) -> Condition:
        """The rows of all ``conditions``, in order."""
        values = torch.cat([one.values for one in conditions])
        keep = torch.cat([one.keep for one in conditions])
        vectors = [one.vectors for one in conditions if one.vectors is not None]
        return cls(values, keep, torch.cat(vectors) if vectors else None)

    @property
    def pooled(self) -> Condition:
        """The text vectors that come with tokens, as a condition; the condition itself without such vectors."""
        if self.vectors is None:
            return self

        return Condition(self.vectors, self.keep)

    def dropped(self, mask: Bool[Tensor, " b"]) -> Condition:
        """Set the rows in ``mask`` to null; null rows stay null."""
        return replace(self, keep=self.keep & ~mask)

    def null(self) -> Condition:
        """Every row null, for the unconditional branch of guidance (Ho and Salimans, 2207.12598)."""
        return replace(self, keep=torch.zeros_like(self.keep))

    def rows(self, index: Int[Tensor, " n"] | Bool[Tensor, " b"] | slice) -> Condition:
        """The chosen rows, in the order of ``index``."""
        vectors = None if self.vectors is None else self.vectors[index]
        return Condition(self.values[index], self.keep[index], vectors)

    def to(self, device: torch.device | str) -> Condition:
        """The same condition on ``device``."""
        vectors = None if self.vectors is None else self.vectors.to(device)
        return Condition(self.values.to(device), self.keep.to(device), vectors)
