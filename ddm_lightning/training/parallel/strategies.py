"""Lightning's strategies, with checkpoints that are sharded, written in the background, and read by any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddm_lightning.training.checkpoint.files import CheckpointWriter, read_rest
from ddm_lightning.training.checkpoint.state import load_groups, load_tensors, named_groups, tensors_of
from ddm_lightning.training.parallel.ranks import RankLauncher


class BackgroundCheckpoints(Strategy):
    """Saves through a ``CheckpointWriter``; loads in place, after the module is sharded and has its optimizer."""

    checkpoints: CheckpointWriter
    checkpoint_written: Callable[[], object] = staticmethod(lambda: None)
    """Called in the first rank's writing thread when a checkpoint is on the disk."""
    _hosts: ProcessGroup | None = None

    def setup(self, trainer: L.Trainer) -> None:
        """Set up the strategy, then what writes its checkpoints.

        Raises:
            UserError: the network keeps what no checkpoint holds.
        """
        super().setup(trainer)
        assert self.lightning_module is not None
        tensors_of(self.lightning_module)  # now rather than at the first save
        self._hosts = self._group()
        from_device = self.root_device.type == "cuda"
        self.checkpoints = CheckpointWriter(self._hosts, leads=self.is_global_zero, from_device=from_device)

    def _group(self) -> ProcessGroup | None:
        """Of the ranks that save and load together; None where each has everything."""
        return None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Tensors are read into those of the sharded module."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: ``save_checkpoint`` takes the tensors where they are."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing, for the same reason."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Copy what is to be saved and write it while training goes on.

        Raises:
            OSError: the checkpoint before could not be written.
        """
        if self._hosts is None and not self.is_global_zero:
            return
        module, (optimizer,) = self.lightning_module, self.optimizers
        assert module is not None
        checkpoint["groups"] = named_groups(module, optimizer)
        self.checkpoints.start(Path(filepath), tensors_of(module, optimizer), checkpoint, self.checkpoint_written)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors in place, and return the rest.

        Raises:
            UserError: the checkpoint is of another network or optimizer.
        """
        path, module, (optimizer,) = Path(self.broadcast(checkpoint_path)), self.lightning_module, self.optimizers
        assert module is not None
        rest = read_rest(path)
        load_tensors(path, module, optimizer, self._hosts)
        load_groups(module, optimizer, rest["groups"], path)
        return rest

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done by ``load_checkpoint``."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done by ``load_checkpoint``."""

    def teardown(self) -> None:
        """End the writing thread, behind what it is at."""
        if hasattr(self, "checkpoints"):
            self.checkpoints.close()
        super().teardown()


class OneDevice(BackgroundCheckpoints, SingleDeviceStrategy):
    """One device."""


class SeveralRanks(BackgroundCheckpoints, ParallelStrategy):
    """What DDP and FSDP2 have in common: the first rank starts the others on its node, and speaks for them."""

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None and self.parallel_devices is not None
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = RankLauncher(self.cluster_environment, len(self.parallel_devices), num_nodes=1)


class Replicated(SeveralRanks, DDPStrategy):
    """DDP: each rank has everything, and the first one saves it."""

    def __init__(self) -> None:
        # Else what is sent is one more copy of all gradients.
        super().__init__(gradient_as_bucket_view=True)

    def configure_ddp(self) -> None:
        """Send no buffers at each step: positions are the same everywhere, as they are after the start."""
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        self.model.broadcast_buffers = False  # not an argument: torch 2.13 warns of it, 2.10 has no other


class Sharded(SeveralRanks, ModelParallelStrategy):
    """FSDP2: each rank saves its shards.

    Args:
        devices: that share the weights.
        gathered: whether weights stay whole from the forward to the backward pass (``strategy.shard_blocks``).
    """

    def __init__(self, devices: int, *, gathered: bool) -> None:
        super().__init__(data_parallel_size=devices, tensor_parallel_size=1)
        self.gathered = gathered

    def _group(self) -> ProcessGroup:
        # On the hosts and for checkpoints alone: they are written while training uses the other one.
        group: ProcessGroup = torch.distributed.new_group(backend="gloo")
        return group
