"""Streaming of prepared shards: one cluster, several, or all."""

from ddm_lightning._compat import ensure_torchvision_importable

# Here, because a package runs before its modules: all of them import Lightning or Streaming.
ensure_torchvision_importable()
