"""How one island's devices train one member together: plain functions applied to a built module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ddm_lightning.config import IslandConfig
from ddm_lightning.core.devices import device_bytes, resolve_accelerator
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import amount
from ddm_lightning.training.parallel.strategies import BackgroundCheckpoints, OneDevice, Replicated, Sharded

# Kinds of calls that a block is compiled for: training, validation and pictures, each with few or one or many samples,
# and the last block where it differs. Beyond torch's 8 a block that has to be one graph would end the training.
_MOST_KINDS_OF_CALLS = 64
_SHARDED_PRECISIONS = ("32-true", "bf16-mixed")
"""Of the precisions here, those that Lightning's ModelParallelStrategy takes."""
HALF = ("bf16-mixed",)
"""Precisions under which sharded weights are gathered in two bytes; float16 has too small a range for a copy."""


def bytes_per_number(precision: str) -> int:
    """Of weights and all that is kept for each: every one of Lightning's precisions but ``64-true`` keeps fp32."""
    return 8 if precision == "64-true" else 4


def checkpoint_bytes(num_parameters: int, num_widths: int, precision: str = "32-true") -> int:
    """Weights, two AdamW moments, the EMA and ``num_widths`` power-function averages."""
    return bytes_per_number(precision) * (4 + num_widths) * num_parameters


def training_bytes(num_parameters: int, num_widths: int = 0, precision: str = "32-true") -> int:
    """What a training keeps in memory besides activations, unsharded: a checkpoint's contents and the gradients."""
    return checkpoint_bytes(num_parameters, num_widths, precision) + bytes_per_number(precision) * num_parameters


def choose_strategy(
    island: IslandConfig, num_parameters: int, num_widths: int = 0, optimizer: str = "adamw"
) -> tuple[BackgroundCheckpoints, str]:
    """Lightning's strategy for this island, and one line that says why.

    Args:
        island: what it has.
        num_parameters: of the network.
        num_widths: power-function averages that are kept besides the EMA.
        optimizer: of ``train.optimizer``.

    Raises:
        UserError: ``single`` with several devices, or a precision or an optimizer that FSDP2 does not take.
    """
    devices, name = island.devices, island.strategy
    if name == "single" and devices > 1:
        raise UserError(
            f"key 'island.strategy' = 'single' uses one device, island.devices = {devices}; set one of them"
        )
    if devices == 1 and name in ("auto", "single"):
        return OneDevice(_one_device(island.accelerator)), "one device"
    reason = "asked for by island.strategy"
    if name == "auto":
        name, reason = _by_memory(island, num_parameters, num_widths)
    if name == "ddp":
        return Replicated(), f"DDP over {devices} devices: {reason}"
    if island.precision not in _SHARDED_PRECISIONS:
        raise UserError(
            f"key 'island.precision' = {island.precision!r}: FSDP2 ({reason}) takes "
            f"{' or '.join(_SHARDED_PRECISIONS)}; set one of them, or island.strategy=ddp where a device holds all"
        )
    if optimizer == "muon":
        raise UserError(
            f"key 'train.optimizer' = 'muon': it needs whole matrices, and FSDP2 ({reason}) shards them; set it to "
            "adamw, or island.strategy=ddp where a device holds all"
        )
    gathered = name == "fsdp-shard-grad-op"
    strategy = Sharded(devices, gathered=gathered)
    weights = "weights stay gathered until the backward pass" if gathered else "weights are gathered block by block"
    return strategy, f"FSDP2 over {devices} devices, {weights}: {reason}"


def _by_memory(island: IslandConfig, num_parameters: int, num_widths: int) -> tuple[str, str]:
    """What communicates least of that which leaves half of a device to activations."""
    unsharded = training_bytes(num_parameters, num_widths, island.precision)
    weights = (2 if island.precision in HALF else bytes_per_number(island.precision)) * num_parameters
    room = 0.5 * device_bytes(island.accelerator)
    reason = f"weights, gradients, AdamW and EMA take {amount(unsharded)} a device unsharded"
    if unsharded < room:
        return "ddp", reason
    # Gathered weights come on top of the shards, and so do a block's whole gradients, which are far less.
    name = "fsdp-shard-grad-op" if weights + unsharded / island.devices < room else "fsdp"
    return name, reason


def _one_device(accelerator: str) -> torch.device:
    kind = resolve_accelerator(accelerator)
    return torch.device("cuda", 0) if kind == "gpu" else torch.device(kind)


class _Recomputed:
    """A block's forward pass, taken once more in the backward pass.

    A class of ours, because a compiler enters no partial of torch's and would compile nothing, and a copy of a block
    has to call itself, which a closure would not.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return checkpoint(self.forward, *inputs, use_reentrant=False, **named)


def checkpoint_blocks(network: nn.Module) -> None:
    """Keep of each block its input alone and compute the rest once more in the backward pass (Chen, 1604.06174)."""
    for block in getattr(network, "blocks", ()):
        # In place of a module around it, so that weights keep their names.
        block.forward = _Recomputed(block.forward)


def compile_blocks(network: nn.Module, backend: str = "inductor") -> None:
    """Compile each transformer block in place (regional compilation: one graph serves all blocks).

    A block that does not fit into one graph ends the first step with an error that names the line: in parts it would be
    slow without a word.
    """
    # A block is small enough to be sent behind its backward pass: torch would cut its graph by DDP's buckets.
    torch._dynamo.config.optimize_ddp = False
    # A last batch of fewer samples gets a graph of its own: one for all sizes would be slower from then on.
    torch._dynamo.config.automatic_dynamic_shapes = False
    for block in getattr(network, "blocks", ()):
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_KINDS_OF_CALLS)
        block.compile(fullgraph=True, backend=backend)


def shard_blocks(network: nn.Module, mesh: DeviceMesh, *, gathered: bool = False, half: bool = False) -> None:
    """Shard each block, then the rest (FSDP2), over ``mesh``.

    Args:
        network: in place.
        mesh: of the devices.
        gathered: whether weights stay whole from the forward to the backward pass: more memory, a third less
            communication (ZeRO-2 in place of ZeRO-3: Rajbhandari et al., 1910.02054).
        half: whether weights are gathered in bfloat16, in which autocast wants nearly all of them; shards, gradients
            and their sums over devices stay float32.
    """
    # Inputs stay as they are: a time in bfloat16 has two digits.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if half else None
    sharded = partial(fully_shard, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    again = False if gathered else None  # None: blocks, but not the rest, which the backward pass begins with
    for block in getattr(network, "blocks", ()):
        sharded(block, reshard_after_forward=again)
    sharded(network, reshard_after_forward=again)
