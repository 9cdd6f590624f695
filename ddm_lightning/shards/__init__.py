"""Shards: written by ``prepare``, read by training."""

from ddm_lightning.core.compat import defer_heavy_packages

# Before Lightning and Streaming are imported.
defer_heavy_packages()
