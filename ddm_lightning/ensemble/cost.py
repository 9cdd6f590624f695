"""What sampling cost: measured GFLOP per image and active experts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """Rows evaluated by an ensemble; guidance evaluates a row twice."""

    expert_rows: list[int]
    """Rows computed by each expert; more than ``active`` where ``stacked`` fills up its batch."""
    router_rows: int = 0
    """Rows computed by the router."""
    rows: int = 0
    """Rows for which any expert was evaluated."""
    active: int = 0
    """Experts active on these rows, summed."""
    images: int = 0
    """Finished samples."""


@dataclass(frozen=True)
class Cost:
    """Cost of the images sampled so far."""

    gflop: float
    """Forward GFLOP per image over all steps, router included; a multiply-add is 2."""
    experts: float
    """Mean number of active experts per evaluation of an image."""
