"""Parallel training of one member: Lightning's strategies, the choice among them, and functions that change a network.

All strategies write sharded checkpoints in the background, and each can load those of the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import strategies
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.devices import device_bytes, device_of
from ddm_lightning.core.environment import Ranks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.members.checkpoints import FILES, TEMPORARY
from ddm_lightning.members.cost import State, chosen_strategy
from ddm_lightning.networks.attention import set_attention
from ddm_lightning.networks.blocks import blocks_of, check_compiler, checkpoint_blocks, compile_blocks
from ddm_lightning.training.checkpoint import (
    CheckpointWriter,
    load_groups,
    load_tensors,
    named_groups,
    read_trainer_state,
    tensors_of,
)

_SHARDED_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""Precisions that Lightning's ModelParallelStrategy supports."""


class BackgroundCheckpoints(strategies.Strategy):
    """Save through a ``CheckpointWriter``; load in place, once the module is sharded and has its optimizer."""

    checkpoints: CheckpointWriter
    checkpoint_written: Callable[[], object] = staticmethod(lambda: None)
    """Called in rank zero's writing thread when a checkpoint is on disk."""
    _hosts: ProcessGroup | None = None

    def setup(self, trainer: L.Trainer) -> None:
        """Set up the strategy and its checkpoint writer.

        Raises:
            UserError: the network's state holds values that are not tensors.
        """
        super().setup(trainer)
        assert self.lightning_module is not None
        tensors_of(self.lightning_module)  # fail now rather than at the first save
        self._hosts = self._group()
        self.checkpoints = CheckpointWriter(
            self._hosts, is_rank_zero=self.is_global_zero, from_device=self.root_device.type == "cuda"
        )

    def _group(self) -> ProcessGroup | None:
        """Ranks that save and load together; None if each rank holds everything."""
        return None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: tensors are loaded into the sharded module."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Empty; ``save_checkpoint`` collects the tensors."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty; ``save_checkpoint`` collects the tensors."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Copy the state and write it while training continues.

        Raises:
            OSError: the previous checkpoint could not be written.
        """
        if self._hosts is None and not self.is_global_zero:
            return

        module = self.lightning_module
        (optimizer,) = self.optimizers
        assert module is not None
        checkpoint["groups"] = named_groups(module, optimizer)
        self.checkpoints.start(Path(filepath), tensors_of(module, optimizer), checkpoint, self.checkpoint_written)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors in place and return everything else.

        Raises:
            UserError: the checkpoint is of another network.
        """
        module = self.lightning_module
        (optimizer,) = self.optimizers
        assert module is not None
        with self._on_each_node(Path(checkpoint_path)) as path:
            rest = read_trainer_state(path)
            load_tensors(path, module, optimizer, self._hosts)

        load_groups(optimizer, rest["groups"])
        return rest

    @contextmanager
    def _on_each_node(self, path: Path) -> Iterator[Path]:
        """Yield a copy of rank zero's checkpoint, removed afterwards, on nodes that do not share its disk."""
        if (path / FILES).exists():
            listed = (path / FILES).read_bytes()
        else:
            listed = b""

        lacks = listed != self.broadcast(listed)
        if self.reduce_boolean_decision(not lacks):
            yield path
            return

        trainer = self.lightning_module.trainer  # type: ignore[union-attr]  # there by now
        copy = path.with_name(f"{TEMPORARY}{path.name}-{trainer.node_rank}")
        writes = lacks and trainer.local_rank == 0
        for name in self.broadcast([file.name for file in path.glob("*")]):
            content = self.broadcast((path / name).read_bytes() if self.is_global_zero else b"")
            if writes:
                copy.mkdir(parents=True, exist_ok=True)
                (copy / name).write_bytes(content)

        self.barrier()
        yield copy if lacks else path
        self.barrier()
        if writes:
            shutil.rmtree(copy)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing; ``load_checkpoint`` has loaded the weights."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing; ``load_checkpoint`` has loaded the state."""

    def teardown(self) -> None:
        """End the writing thread after its running save."""
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()

        super().teardown()


class OneDevice(BackgroundCheckpoints, strategies.SingleDeviceStrategy):
    """Train on one device."""


class Replicated(BackgroundCheckpoints, strategies.DDPStrategy):
    """DDP: every rank holds everything, and rank zero saves it."""

    def configure_ddp(self) -> None:
        """Send no buffers at each step: positions are equal on all ranks from the start."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.broadcast_buffers = False  # not an argument: torch 2.13 warns of it, 2.10 has no other


class Sharded(BackgroundCheckpoints, strategies.ModelParallelStrategy):
    """FSDP2: each rank saves its shards.

    Args:
        island: weights are shared by the devices of a node; nodes hold copies (HSDP).
        reshard_after_forward: whether to shard weights again before the backward pass (see ``shard_blocks``).
    """

    def __init__(self, island: IslandConfig, *, reshard_after_forward: bool) -> None:
        # Lightning's names for the two dimensions; both share out the data.
        super().__init__(data_parallel_size=island.nodes, tensor_parallel_size=island.devices)
        self.reshard_after_forward = reshard_after_forward

    def _group(self) -> ProcessGroup:
        # On the hosts, for checkpoints alone: training uses the other group while they are written.
        return torch.distributed.new_group(backend="gloo")


def environment(mine: Ranks) -> ClusterEnvironment:
    """Ranks are as torchrun sets them; tasks of a SLURM job are not ranks."""
    if mine.launched:
        return TorchElasticEnvironment()

    alone = LightningEnvironment()
    alone.set_global_rank(0)  # where SLURM_PROCID numbers tasks, Lightning has taken it for a rank, which logs nothing
    return alone


def choose_strategy(island: IslandConfig, state: State, optimizer: str = "adamw") -> tuple[BackgroundCheckpoints, str]:
    """Choose the strategy of an island: ``auto`` is the one with the least communication that fits the devices.

    Args:
        island: its devices and settings.
        state: of the training.
        optimizer: ``train.optimizer``.

    Returns:
        The strategy, and one line that gives the reason.

    Raises:
        UserError: a precision or optimizer that FSDP2 does not support.
    """
    size = island.size
    name = chosen_strategy(island, state, device_bytes(island.accelerator))
    if name == "single":
        device = device_of(island.accelerator)
        return OneDevice(torch.device("cuda", 0) if device.type == "cuda" else device), "one device"

    reason = "asked for by island.strategy"
    if island.strategy == "auto":
        parts = "weights, gradients, optimizer and EMA" if state.ema else "weights, gradients and optimizer"
        reason = f"{parts} take {format_bytes(state.training)} per device unsharded"

    if name == "ddp":
        # A bucket view: otherwise DDP keeps another copy of all gradients.
        return Replicated(gradient_as_bucket_view=True), f"DDP over {size}: {reason}"

    remedy = "or island.strategy=ddp if a device holds everything"
    if island.precision not in _SHARDED_PRECISIONS:
        raise UserError(
            f"key 'island.precision' = {island.precision!r}: FSDP2 ({reason}) takes "
            f"{' or '.join(_SHARDED_PRECISIONS)}; set one of them, {remedy}"
        )

    if optimizer == "muon":
        raise UserError(
            f"key 'train.optimizer' = 'muon': FSDP2 ({reason}) splits the matrices that Muon needs whole; "
            f"set it to adamw, {remedy}"
        )

    reshard = name == "fsdp"
    if reshard:
        how = "weights are gathered block by block"
    else:
        how = "weights stay gathered until the backward pass"

    if island.nodes > 1:
        within = "shards within a node, "
    else:
        within = ""

    return Sharded(island, reshard_after_forward=reshard), f"FSDP2 over {size}, {within}{how}: {reason}"


def apply_island(network: nn.Module, island: IslandConfig) -> None:
    """Apply an island's settings to a network: attention kernel, activation checkpointing, compilation."""
    set_attention(network, island.attention)
    if island.activation_checkpointing:
        checkpoint_blocks(network)

    if island.compile:
        check_compiler("island.compile", device_of(island.accelerator))
        compile_blocks(network)


def halve_weights(network: nn.Module) -> None:
    """Store trained weights in bfloat16, in place; buffers and frozen weights stay."""
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()


def shard_blocks(
    network: nn.Module, mesh: DeviceMesh, *, reshard_after_forward: bool = True, half: bool = False
) -> None:
    """Shard each block, then the rest (FSDP2), over ``mesh``; with two dimensions, copies over the first (HSDP).

    Args:
        network: changed in place.
        mesh: the devices.
        reshard_after_forward: whether to shard weights again between the forward and the backward pass. Without: more
            memory, a third less communication (ZeRO-2 instead of ZeRO-3: Rajbhandari et al., 1910.02054).
        half: whether weights are gathered in bfloat16, to which autocast casts nearly all of them anyway; shards,
            gradients and their sums over devices stay float32.
    """
    policy = MixedPrecisionPolicy()
    if half:
        # Inputs are not cast: a time in bfloat16 has two digits.
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)

    # None: torch reshards the blocks, but not the rest, which the backward pass needs first.
    again = None if reshard_after_forward else False
    for part in (*blocks_of(network), network):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
