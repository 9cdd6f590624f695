"""Averages of the weights during training: an exponential moving average, and power-function averages of any width.

They live in the optimizer's state, so saving, resuming and resharding need no code of their own, and a sharded
parameter averages its local shard without communication.

The weight of step τ in a power-function average at step t is proportional to τ^γ; its width is the standard deviation
of that profile, as a share of t. Snapshots of a few widths, on disk, allow any width to be chosen after training
(``ema_choice``). Numbers of equations are those of EDM2 (Karras et al., 2312.02696), which calls the width σ_rel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, read_json
from ddm_lightning.core.sharded import local
from ddm_lightning.core.weights import save_weights

KEY = "ema"
"""Key of the exponential average in a parameter's optimizer state."""
BEST = "best"
"""Key of its copy at the best validation (``train.keep``)."""
STEPS = "ema_steps"
BEHIND = "ema_behind"
"""Steps of a parameter group that its averages have not taken in; absent if there are none."""
HOST_STEPS = 10
"""Steps between averages on the host: few beside the thousands that an average spans, many beside a copy of weights."""
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


_Due: TypeAlias = tuple[list[Tensor], list[Tensor], float]
"""Averages, the weights that they are to take in, and the decay."""


class Averaging:
    """Averages an optimizer's parameters after its steps, in its state, on the device or on the host.

    On the device they take in the weights of each step. On the host they take in those of the first step and of every
    ``every``-th one, with the product of the decays since the time before. A stream of its own copies the weights
    there, and a thread waits for it and averages. A step waits only if the averages before are not ready; the first
    one makes them.

    Whoever reads an average between two such steps gets it with that moment's weights taken in alike. The one in the
    state stays as it was, so that a stop changes no bit.

    Args:
        decays: decay of each average, by its key, at a step counted from 1.
        every: 0 for averages on the device.
        on_gpu: whether the weights are on a GPU.
    """

    def __init__(self, decays: Mapping[str, Callable[[int], float]], every: int = 0, *, on_gpu: bool = False) -> None:
        self.every = every
        # Not in the optimizer's state, which the optimizer would then take for its own and not initialise.
        self.initial: dict[Tensor, Tensor] = {}
        """Weights before the first step, to start from; a parameter without starts from those after it."""
        self._decays = decays
        # Asking DTensors for their shards at each step takes longer than the average.
        self._shard_of = functools.cache(local)
        self._thread = ThreadPoolExecutor(1, "ema")
        self._pending: Future[None] | None = None
        self._stager = StateDictStager(pin_memory=on_gpu)
        self._stream: Any = None
        if on_gpu:
            self._stream = torch.cuda.Stream()

    def decay(self, key: str, group: dict[str, Any], behind: int) -> float:
        """Product of the decays of the last ``behind`` steps of a parameter group."""
        return math.prod(map(self._decays[key], range(group[STEPS] - behind + 1, group[STEPS] + 1)))

    def wait(self, *_: Any) -> None:
        """Wait until the averages on the host have taken in what was copied for them."""
        if self._pending is not None:
            self._pending.result()

    def before_step(self, *_: Any) -> None:
        """Let the device, not the host, change no weight that is still being copied."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Average, or start to."""
        due: list[_Due] = []
        for group in optimizer.param_groups:
            group[STEPS] += 1
            behind = group.pop(BEHIND, 0) + 1
            if self.every and group[STEPS] > 1 and group[STEPS] % self.every:
                group[BEHIND] = behind
                continue

            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue

            weights = [self._shard_of(parameter).detach() for parameter in parameters]
            for key in self._decays:
                averages = [self._shard(optimizer.state[parameter], key, parameter) for parameter in parameters]
                decay = self.decay(key, group, behind)
                if self.every:
                    due.append((averages, weights, decay))
                else:
                    _average(averages, weights, decay)

        self.initial.clear()
        if due:
            self.wait()
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream())

            with torch.cuda.stream(self._stream):  # no other one for None
                copies = self._stager.stage([weights for _, weights, _ in due], non_blocking=True)

            self._pending = self._thread.submit(self._take_in, due, copies)

    def _shard(self, state: dict[str, Any], key: str, parameter: Tensor) -> Tensor:
        """This rank's shard of a parameter's average, which is made if there is none."""
        if key not in state:
            state[key] = self.copied(self.initial.get(parameter, parameter))
        elif self.every:
            state[key] = state[key].cpu()  # a Trainer that is not ours puts all state on the device as it resumes

        return self._shard_of(state[key])

    def copied(self, weights: Tensor) -> Tensor:
        """Copy weights to where their averages are, in float32; the copy keeps their (perhaps uneven) sharding."""
        return weights.detach().to(self.home(weights), torch.float32, copy=True)

    def home(self, parameter: Tensor, key: str = KEY) -> torch.device:
        """Device of an entry in the optimizer's state of a parameter."""
        if self.every and (key == BEST or key.startswith(KEY)):
            return torch.device("cpu")

        return parameter.device

    def _take_in(self, due: list[_Due], copies: list[list[Tensor]]) -> None:
        if self._stream is not None:
            self._stream.synchronize()

        for (averages, _, decay), weights in zip(due, copies, strict=True):
            _average(averages, weights, decay)


def track_ema(
    optimizer: Optimizer, decay: float, widths: Sequence[float] = (), *, from_initial: bool = False, every: int = 0
) -> None:
    """Average every parameter after steps of ``optimizer``, under ``KEY`` and each ``width_key``.

    The first average is the weights after the first step, unless ``from_initial``.

    Args:
        optimizer: holds the averages in its state, float32.
        decay: of the exponential average. It warms up as ``min(decay, (1 + n) / (10 + n))`` over steps n, so that the
            initial weights do not dominate the first thousand steps.
        widths: widths of power-function averages.
        from_initial: whether the averages start from the weights before the first step, which are worth something.
        every: if not 0, keep them on the host, with the weights of every so many steps (see ``Averaging``).
    """
    decays: dict[str, Callable[[int], float]] = {KEY: lambda step: min(decay, step / (9 + step))}
    decays |= {width_key(width): functools.partial(power_decay, exponent_of(width)) for width in widths}
    on_gpu = optimizer.param_groups[0]["params"][0].is_cuda
    averaging = Averaging(decays, every, on_gpu=every > 0 and on_gpu)
    for group in optimizer.param_groups:
        group.setdefault(STEPS, 0)
        if from_initial:
            averaging.initial |= {parameter: averaging.copied(parameter) for parameter in group["params"]}

    optimizer.averaging = averaging  # type: ignore[attr-defined]
    optimizer.register_step_pre_hook(averaging.before_step)
    optimizer.register_step_post_hook(averaging.after_step)
    optimizer.register_state_dict_pre_hook(averaging.wait)


def averaging_of(optimizer: Optimizer) -> Averaging:
    """What ``track_ema`` has made of ``optimizer``; one without averages for another."""
    return getattr(optimizer, "averaging", None) or Averaging({})


def averages_of(optimizer: Optimizer, key: str = KEY) -> dict[Tensor, Tensor]:
    """Averages by parameter, float32, sharded as the parameters, all steps taken in; without those of no step."""
    averaging = averaging_of(optimizer)
    averaging.wait()
    found: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        behind = group.get(BEHIND, 0)
        for parameter in group["params"]:
            average = optimizer.state.get(parameter, {}).get(key)
            if average is None:
                continue

            if behind:
                average = average.clone()
                shard = local(average)
                shard.lerp_(local(parameter.detach()).to(shard), 1 - averaging.decay(key, group, behind))

            found[parameter] = average

    return found


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
    averages = averages_of(optimizer, key)
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: averages.get(parameter, parameter.detach()) for name, parameter in parameters}


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
            on_device = value.to(value.device_mesh.device_type)  # which can gather; hosts may not
            whole = on_device.full_tensor()  # type: ignore[attr-defined]
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
