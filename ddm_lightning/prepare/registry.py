"""Names of the plug-ins of ``prepare``: sources, image encoders, caption encoders, features."""

from __future__ import annotations

from ddm_lightning.registry import Registry

SOURCES = Registry("source", "ddm_lightning.sources")
IMAGE_ENCODERS = Registry("image encoder", "ddm_lightning.image_encoders")
CAPTION_ENCODERS = Registry("caption encoder", "ddm_lightning.caption_encoders")
FEATURES = Registry("feature network", "ddm_lightning.features")
