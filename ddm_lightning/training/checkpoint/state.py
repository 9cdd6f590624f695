"""Training state as named tensors: weights, and the optimizer's moments and averages by parameter name."""

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
    """State of ``module`` and ``optimizer`` as ``model/NAME`` and ``optimizer/KEY/NAME``, sharing their memory.

    Names, because PyTorch numbers an optimizer's parameters by its groups, not in the module's order. A tied weight is
    included once, under its first name.

    Raises:
        UserError: the module's ``state_dict`` holds a value that is not a tensor.
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
    """The optimizer's parameter groups as plain values, with names instead of parameters."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]


def load_groups(module: nn.Module, optimizer: Optimizer, groups: list[dict[str, Any]], source: Path) -> None:
    """Restore the optimizer's parameter groups from the result of ``named_groups``.

    Raises:
        UserError: the groups hold other parameters, or settings that this optimizer does not have.
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
    """Load weights, moments and averages in place, whatever number of ranks saved them.

    Args:
        path: the checkpoint.
        module: sharded or not.
        optimizer: None to load the weights alone.
        group: all ranks that hold parts of the weights; the call is a collective of it.

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
        parameters = dict(module.named_parameters())
        for full_name, (size, dtype) in stored.items():
            if full_name.startswith(_OPTIMIZER):
                key, _, name = full_name.removeprefix(_OPTIMIZER).partition("/")
                parameter = parameters[name]
                if size == parameter.shape:  # then sharded as the parameter is
                    room = torch.empty_like(parameter.detach(), dtype=dtype)
                else:
                    room = torch.empty(size, dtype=dtype, device=parameter.device)
                optimizer.state[parameter][key] = room
        into = tensors_of(module, optimizer)
    read_tensors(path, into, group)
