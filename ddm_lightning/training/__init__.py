"""One member's training: LightningModules, their callbacks, checkpoints and strategy."""
