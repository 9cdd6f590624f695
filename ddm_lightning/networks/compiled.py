"""Compiled transformer blocks."""

from __future__ import annotations

import torch
from torch import nn

# Compiled variants of a block: training, validation and previews, each with few, one or many samples, and the last
# block if it differs. Beyond torch's limit of 8, a block compiled with ``fullgraph`` would end the training.
_MOST_VARIANTS = 64


def compile_blocks(network: nn.Module, backend: str = "inductor", *, any_size: bool = False) -> None:
    """Compile each transformer block in place (regional compilation: one graph serves all blocks).

    A block that does not fit into one graph ends the first step with an error that names the line; compiled in parts,
    it would be slow without notice.

    Args:
        network: its ``blocks`` are compiled, if it has any.
        backend: of ``torch.compile``.
        any_size: one graph for all batch sizes, as sampling needs, where experts get rows as they come. Otherwise each
            size gets its own: one for all would slow down the steps of a training, which are of few sizes.
    """
    config = torch._dynamo.config
    config.optimize_ddp = False  # would split a block's graph by DDP's buckets; blocks are small enough
    config.automatic_dynamic_shapes = any_size
    config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
    for block in getattr(network, "blocks", ()):
        block.compile(fullgraph=True, backend=backend)
