"""What this rank holds of a tensor that is sharded over ranks (FSDP2)."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory with ``tensor``; a tensor that is not sharded is itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
