"""Shards: written by ``prepare``, read by training."""

from ddm_lightning.core.compat import defer_torchmetrics

# Here, because a package runs before its modules: one of them imports Lightning.
defer_torchmetrics()
