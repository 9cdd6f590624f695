"""Shards: what ``prepare`` writes and training reads."""

from ddm_lightning.core.compat import ensure_torchvision_importable

# Lightning and Streaming, which modules here import, import torchvision.
ensure_torchvision_importable()
