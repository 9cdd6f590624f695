"""One member's training: LightningModules, their callbacks, checkpoints and strategy."""

from ddm_lightning.core.compat import defer_heavy_packages

# Here, because a package runs before its modules: all of them import Lightning or Streaming.
defer_heavy_packages()
