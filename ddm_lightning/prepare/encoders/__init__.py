"""Built-in encoders of pictures and captions, and feature networks; importing them registers their names."""

from __future__ import annotations

from ddm_lightning.prepare.encoders.captions import HashedWords, UniversalSentenceEncoder
from ddm_lightning.prepare.encoders.clip_text import CLIPText, T5Text
from ddm_lightning.prepare.encoders.diffusers_vae import DiffusersVAE
from ddm_lightning.prepare.encoders.dinov2 import DinoV2, TimmFeatures
from ddm_lightning.prepare.encoders.efficientnet import EfficientNetFeatures
from ddm_lightning.prepare.encoders.pixels import Pixels
from ddm_lightning.prepare.encoders.pooled import PooledPixels

__all__ = [
    "CLIPText",
    "DiffusersVAE",
    "DinoV2",
    "EfficientNetFeatures",
    "HashedWords",
    "Pixels",
    "PooledPixels",
    "T5Text",
    "TimmFeatures",
    "UniversalSentenceEncoder",
]
