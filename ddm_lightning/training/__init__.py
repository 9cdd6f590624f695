"""One member's training: LightningModules, their callbacks, checkpoints and strategy."""

from ddm_lightning.core.compat import defer_torchmetrics

# Here, because a package runs before its modules: all of them import Lightning.
defer_torchmetrics()
