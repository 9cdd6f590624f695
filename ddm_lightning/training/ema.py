"""Averages of the weights during training: an exponential moving average, and power-function averages of any width.

They live in the optimizer's state, so saving, resuming and resharding need no code of their own, and a sharded
parameter averages its local shard without communication.

The weight of step τ in a power-function average at step t is proportional to τ^γ; its width is the standard deviation
of that profile, as a share of t. Snapshots of a few widths, on disk, allow any width to be chosen after training
(``ema_choice``). Numbers of equations are those of EDM2 (Karras et al., 2312.02696), which calls the width σ_rel.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.devices import local
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, read_json
from ddm_lightning.core.weights import save_weights

KEY = "ema"
"""Key of the exponential average in a parameter's optimizer state."""
BEST = "best"
"""Key of its copy at the best validation (``train.keep``)."""
STEPS = "ema_steps"
FOLDER = "ema"
"""Folder of snapshots inside the member's folder."""
WIDEST = 12**-0.5
"""Width of exponent 0, which weighs all steps alike."""
_INDEX = "snapshots.json"


def width_key(width: float) -> str:
    """Key of the power-function average of ``width`` in a parameter's optimizer state."""
    return f"{KEY}_{width:g}"


def exponent_of(width: float) -> float:
    """Exponent γ of the profile of ``width``, which is in (0, ``WIDEST``] (eq. 126 and algorithm 2).

    The profile's variance is (γ + 1) / ((γ + 2)² (γ + 3)) of t² (eq. 123), which decreases with γ.

    Raises:
        UserError: no profile has this width.
    """
    if not 0 < width <= WIDEST * (1 + 1e-9):
        raise UserError(f"width {width:g}: is a share of the training, above 0 and at most {WIDEST:.4f}")

    inverse = width**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return max(0.0, float(roots[np.isreal(roots)].real.max()))


def power_decay(exponent: float, step: int) -> float:
    """Decay of a power-function average at ``step``, counted from 1: (1 − 1/t)^(γ + 1) (eq. 127)."""
    return float((1.0 - 1.0 / step) ** (exponent + 1.0))


def check_float32(network: nn.Module) -> None:
    """Check that all trained weights are float32; in half precision, small steps and averages would round to nothing.

    Raises:
        UserError: one is not.
    """
    for name, parameter in network.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UserError(
                f"the network's weight {name!r} is {parameter.dtype}: it must be built in float32; "
                "island.precision=bf16-mixed computes in bfloat16"
            )


def track_ema(optimizer: Optimizer, decay: float, widths: Sequence[float] = (), *, from_initial: bool = False) -> None:
    """Average every parameter after each step of ``optimizer``, under ``KEY`` and each ``width_key``.

    The first average is the weights after the first step, unless ``from_initial``.

    Args:
        optimizer: holds the averages in its state.
        decay: of the exponential average. It warms up as ``min(decay, (1 + n) / (10 + n))`` over steps n, so that the
            initial weights do not dominate the first thousand steps.
        widths: widths of power-function averages.
        from_initial: whether the averages start from the weights before the first step, which are worth something.
    """
    exponents = {width_key(width): exponent_of(width) for width in widths}
    for group in optimizer.param_groups:
        group.setdefault(STEPS, 0)

    # Asking DTensors for their shards at each step takes longer than the average.
    shard_of = functools.cache(local)
    # Not in the optimizer's state, which the optimizer would then take for its own and not initialise.
    initial: dict[Tensor, Tensor] = {}
    if from_initial:
        for group in optimizer.param_groups:
            initial |= {parameter: _float32_copy(parameter) for parameter in group["params"]}

    @torch.no_grad()
    def after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for group in optimizer.param_groups:
            steps = group[STEPS]
            decays = {KEY: min(decay, (1 + steps) / (10 + steps))}
            decays |= {key: power_decay(exponent, steps + 1) for key, exponent in exponents.items()}
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for key, decay_now in decays.items():
                averages = []
                for parameter in parameters:
                    state = optimizer.state[parameter]
                    if key not in state:
                        # A clone keeps the parameter's (perhaps uneven) sharding.
                        state[key] = _float32_copy(initial.get(parameter, parameter))

                    averages.append(shard_of(state[key]))

                if averages:
                    _average(averages, [shard_of(parameter) for parameter in parameters], decay_now)

            group[STEPS] = steps + 1

        initial.clear()

    optimizer.register_step_post_hook(after_step)


def _float32_copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.float32, copy=True)


def _average(averages: list[Tensor], weights: list[Tensor], decay: float) -> None:
    """Move averages, in place, to weights; those in bfloat16 are brought to float32 one by one."""
    average = get_ema_multi_avg_fn(decay)
    if weights[0].dtype == torch.float32:
        average(averages, weights, 0)
        return

    for one, weight in zip(averages, weights, strict=True):
        average([one], [weight.float()], 0)


def ema_tensors(module: nn.Module, optimizer: Optimizer, key: str = KEY) -> dict[str, Tensor]:
    """Averages by parameter name, sharded as the parameters; a parameter without steps is its own average.

    Tied weights are included under each name, as in ``state_dict``.
    """
    return {
        name: optimizer.state.get(parameter, {}).get(key, parameter.detach())
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def unsharded_ema(module: nn.Module, optimizer: Optimizer, key: str = KEY, *, keeps: bool = True) -> dict[str, Tensor]:
    """Unsharded averages on the CPU, fp32. A collective: every rank calls it.

    Args:
        module: the network.
        optimizer: its optimizer.
        key: key of the average.
        keeps: whether this rank wants the result; otherwise it gets none.
    """
    found: dict[str, Tensor] = {}
    for name, value in ema_tensors(module, optimizer, key).items():
        if isinstance(value, DTensor):
            whole = value.full_tensor()
        else:
            whole = value

        if keeps:
            found[name] = whole.detach().float().cpu().clone()

    return found


def kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Entries of ``state_dict`` that are not parameters, such as batch-norm statistics, copied to the CPU."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items() if name not in parameters}


def _reshard(module: nn.Module) -> None:
    """Shard weights that a forward pass without a backward pass left gathered (FSDP2)."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@contextmanager
def ema_weights(module: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Within the block ``module`` has its averaged weights; afterwards its own, bit for bit."""
    _reshard(module)
    averages = ema_tensors(module, optimizer)
    own = {name: local(parameter.detach()).clone() for name, parameter in module.named_parameters()}

    def load(values: dict[str, Tensor]) -> None:
        _reshard(module)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                local(parameter.detach()).copy_(local(values[name]))

    load(averages)
    try:
        yield
    except Exception:  # but not GeneratorExit: when Python collects an open validation, FSDP's state is gone
        load(own)
        raise

    load(own)


@dataclass(frozen=True)
class Snapshot:
    """A power-function average at one step."""

    width: float
    step: int

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"width-{self.width:g}-step-{self.step:08d}.safetensors"


def snapshot_steps(train: TrainConfig) -> list[int]:
    """Optimizer steps after which snapshots are written: evenly spaced, up to the last step."""
    num = train.ema_snapshots
    return sorted({round(train.max_steps * part / num) for part in range(1, num + 1)} - {0})


def all_snapshots(train: TrainConfig) -> list[Snapshot]:
    """Snapshots of a whole training."""
    return [Snapshot(width, step) for width in train.ema_widths for step in snapshot_steps(train)]


class EmaSnapshots(L.Callback):
    """Write the averages of ``train.ema_widths``, float32, to the member's folder ``ema``.

    It comes before ``RollingCheckpoints``, so that a training that resumes from a checkpoint has its step's snapshots.
    """

    def __init__(self, folder: Path, train: TrainConfig) -> None:
        self.folder = folder / FOLDER
        self.snapshots = all_snapshots(train)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: object) -> None:
        """Write the snapshots of this step. A resumed training writes some again, with the same bytes."""
        for snapshot in self.snapshots:
            if snapshot.step == trainer.global_step:
                key = width_key(snapshot.width)
                optimizer = trainer.optimizers[0]
                weights = unsharded_ema(module.network, optimizer, key, keeps=trainer.is_global_zero)
                if trainer.is_global_zero:
                    path = self.folder / snapshot.file
                    index = read_index(self.folder) | {snapshot.file: save_weights(path, weights, str(path))}
                    atomic_write_json(self.folder / _INDEX, index)


def snapshots_remedy(folder: Path) -> str:
    """Remedy for damaged snapshots in ``folder``, for error lines."""
    return f"remove {folder.parent}, then train the member again"


def read_index(folder: Path) -> dict[str, str]:
    """SHA-256 of each snapshot in ``folder`` by file name; empty before the first.

    Raises:
        UserError: the index is damaged.
    """
    path = folder / _INDEX
    if path.exists():
        return read_json(path, "the index of snapshots", snapshots_remedy(folder))

    return {}
