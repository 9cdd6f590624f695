"""Packages that only some plug-ins need."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from ddm_lightning.errors import UserError


def require(wanted_by: str, *names: str, extra: str = "demo") -> None:
    """Refuse to go on without the distributions ``names``, which ``extra`` installs.

    Raises:
        UserError: one is not installed; the line says how to install it.
    """
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            raise UserError(
                f"{wanted_by} needs the package {name!r}; install it with: pip install 'ddm_lightning[{extra}]'"
            ) from None


def file_of(name: str, relative: str) -> Path:
    """A file inside the distribution ``name``, found without importing it."""
    return Path(str(distribution(name).locate_file(relative)))
