"""Built-in sources; importing them registers their names."""

from __future__ import annotations

from ddm_lightning.prepare.sources.blobs import Blobs
from ddm_lightning.prepare.sources.digits import Digits
from ddm_lightning.prepare.sources.openmoji import OpenMoji

__all__ = ["Blobs", "Digits", "OpenMoji"]
