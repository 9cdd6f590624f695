"""Tensors that ranks share by FSDP2; apart from ``devices``, as they are a second to import and sampling has none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; other tensors unchanged."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()

    return tensor


def by_rows(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the device of ``parameter``; their rows, as many as its own, are sharded as its own are."""
    if isinstance(parameter, DTensor):
        return distributed.tensor.zeros(
            *shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=parameter.placements
        )

    return torch.zeros(*shape, dtype=dtype, device=parameter.device)
