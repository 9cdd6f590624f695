"""What a member's training goes on from: weights, and the optimizer's moments and averages, by parameter name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from ddm_lightning.core.devices import local
from ddm_lightning.core.errors import UserError
from ddm_lightning.training.checkpoint.files import read_tensors, stored_sizes

_MODEL, _OPTIMIZER = "model/", "optimizer/"


def tensors_of(module: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """``model/NAME`` and ``optimizer/KEY/NAME`` of all of ``module``; tensors share memory with what they are of.

    By name, because PyTorch numbers an optimizer's parameters in the order of its groups, which is not the module's. A
    tensor of two names is there once, by the first.

    Raises:
        UserError: the network keeps what is no tensor.
    """
    found, seen = {}, set()
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(f"the network's state_dict has {name}, a {type(value).__name__}: it may hold tensors only")
        place = (local(value).data_ptr(), value.shape)
        if place not in seen or not local(value).numel():
            found[_MODEL + name] = value.detach()
        seen.add(place)
    if optimizer is not None:
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{_OPTIMIZER}{key}/{name}"] = value.detach()
    return found


def named_groups(module: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups with names for parameters: plain values, no tensors."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]


def load_groups(module: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]], source: Path) -> None:
    """Set the optimizer's groups to what ``named_groups`` returned.

    Raises:
        UserError: they group other parameters, or have settings that this one does not know.
    """
    own = named_groups(module, optimizer)
    same = [group["params"] for group in groups] == [group["params"] for group in own]
    if not same or any(saved.keys() - now.keys() for saved, now in zip(groups, own, strict=True)):
        raise UserError(f"{source}: is the checkpoint of another optimizer; remove it, or set the experiment back")
    for live, group in zip(optimizer.param_groups, groups, strict=True):
        live.update({key: value for key, value in group.items() if key != "params"})


def load_tensors(
    path: Path, module: nn.Module, optimizer: Optimizer | None = None, group: ProcessGroup | None = None
) -> None:
    """Set weights, moments and averages in place to those of a checkpoint, whatever number of ranks wrote it.

    Args:
        path: the checkpoint.
        module: sharded or not.
        optimizer: None for the weights alone.
        group: of all ranks that hold parts of the weights; a collective of it.

    Raises:
        UserError: the checkpoint is of another network.
    """
    stored = stored_sizes(path)
    into = tensors_of(module)
    shapes = {name: value.shape for name, value in into.items()}
    found = {name: size for name, (size, _) in stored.items() if name.startswith(_MODEL)}
    if shapes != found:
        name = min(key for key in shapes.keys() | found.keys() if shapes.get(key) != found.get(key))
        raise UserError(
            f"{path}: is the checkpoint of another network, which differs in {name.removeprefix(_MODEL)}; remove it, "
            "or set the experiment back"
        )
    if optimizer is not None:
        into |= _room_for_state(stored, module, optimizer)
    read_tensors(path, into, group)


def _room_for_state(
    stored: dict[str, tuple[torch.Size, torch.dtype]], module: nn.Module, optimizer: Optimizer
) -> dict[str, Tensor]:
    """State of ``optimizer`` as it will be: of a parameter's shape, and then sharded as it is, or a number."""
    parameters = dict(module.named_parameters())
    for full_name, (size, dtype) in stored.items():
        if not full_name.startswith(_OPTIMIZER):
            continue
        key, _, name = full_name.removeprefix(_OPTIMIZER).partition("/")
        parameter = parameters[name].detach()
        if size == parameter.shape:
            room = torch.empty_like(parameter, dtype=dtype)
        else:
            room = torch.empty(size, dtype=dtype, device=parameter.device)
        optimizer.state[parameters[name]][key] = room
    return {name: value for name, value in tensors_of(module, optimizer).items() if name.startswith(_OPTIMIZER)}
