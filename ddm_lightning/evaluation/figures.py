"""Figures as PNG files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from ddm_lightning.files import atomic_write

_DOTS_PER_INCH = 120


def save_figure(path: Path, figure: Figure) -> None:
    """Write ``figure`` to ``path``, whole or not at all."""
    atomic_write(path, lambda temporary: figure.savefig(temporary, format="png", dpi=_DOTS_PER_INCH))
