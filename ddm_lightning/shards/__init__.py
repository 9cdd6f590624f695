"""Shards: written by ``prepare``, read by training."""

from ddm_lightning.core.compat import defer_heavy_packages, ensure_torchvision_importable

# Before Lightning and Streaming are imported.
ensure_torchvision_importable()
defer_heavy_packages()
