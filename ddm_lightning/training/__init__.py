"""One member's training: losses, LightningModule, callbacks, checkpoints and ranks.

- ``fit``: build everything and train; ``module``: one step; ``objective``: noisy batches and losses in pure PyTorch
- ``optimizer``, ``compact``, ``ema``, ``guard``: the step's end
- ``callbacks``, ``checkpoint``, ``previews``: between steps
- ``parallel``, ``ranks``: several devices and nodes; ``extension``: one more output for a router
"""

from ddm_lightning.core.compat import defer_torchmetrics

# Here, because a package runs before its modules: all of them import Lightning.
defer_torchmetrics()
