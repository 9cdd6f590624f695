"""Built-in encoders of pictures and captions, and feature networks; importing them registers their names."""

from __future__ import annotations

from ddm_lightning.prepare.encoders.captions import HashedWords, UniversalSentenceEncoder
from ddm_lightning.prepare.encoders.efficientnet import EfficientNetFeatures
from ddm_lightning.prepare.encoders.pixels import Pixels
from ddm_lightning.prepare.encoders.pooled import PooledPixels

__all__ = ["EfficientNetFeatures", "HashedWords", "Pixels", "PooledPixels", "UniversalSentenceEncoder"]
