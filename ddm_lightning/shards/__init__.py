"""Shards: written by ``prepare``, read by training."""

from ddm_lightning.core.compat import ensure_torchvision_importable

# Lightning and Streaming import torchvision.
ensure_torchvision_importable()
