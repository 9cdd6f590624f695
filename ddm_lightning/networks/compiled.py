"""Compiled transformer blocks."""

from __future__ import annotations

import torch
from torch import nn

# torch compiles a block anew for training, validation and previews, for each kind of batch size, and for a last block
# that differs. At the default limit of 8 variants, a block compiled with ``fullgraph`` would end the training.
_MOST_VARIANTS = 64


def compile_blocks(network: nn.Module, backend: str = "inductor", *, any_size: bool = False) -> None:
    """Compile each transformer block in place (regional compilation: one graph serves all blocks).

    A block that does not fit into one graph ends the first step with an error that names the line; graph breaks would
    silently make it slow.

    Args:
        network: its ``blocks`` are compiled, if it has any.
        backend: of ``torch.compile``.
        any_size: compile one graph for all batch sizes, as sampling needs, where an expert's number of rows varies.
            Otherwise compile one graph per size, which is faster; a training has few sizes.
    """
    config = torch._dynamo.config
    config.optimize_ddp = False  # would split a block's graph by DDP's buckets; blocks are small enough
    config.automatic_dynamic_shapes = any_size
    config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
    for block in getattr(network, "blocks", ()):
        block.compile(fullgraph=True, backend=backend)
