"""Attention as one function with several back ends, chosen by the configuration."""

from __future__ import annotations

import importlib
import warnings
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ddm_lightning.core.errors import UserError

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""torch's own kernels."""

Rotation: TypeAlias = Float[Tensor, "#b n 2 half"]
"""Cosines, then sines, of each token's angles; shared by all rows, or one per row."""
_REMEDY = "set island.attention=sdpa"
_xformers_ops: Any = None


def attention(
    q: Float[Tensor, "b n h d"], k: Float[Tensor, "b m h d"], v: Float[Tensor, "b m h d"], backend: str = "auto"
) -> Float[Tensor, "b n h d"]:
    """Softmax attention of each head, ``softmax(q kᵀ / √d) v`` (Vaswani et al., 1706.03762, eq. 1).

    Args:
        q: queries.
        k: keys.
        v: values.
        backend: ``sdpa`` is torch's, with a kernel of its choice (``chosen_kernel``); ``flash``, ``cudnn`` and
            ``efficient`` fix that kernel; ``xformers`` is memory-efficient attention on CUDA; ``auto`` is ``sdpa``,
            which runs everywhere.

    Raises:
        RuntimeError: the kernel cannot run here (see ``check_attention``, which also loads xformers).
    """
    if backend in _KERNELS:
        with sdpa_kernel(_KERNELS[backend]):
            return attention(q, k, v, "sdpa")

    if backend == "xformers":
        return _xformers_ops.memory_efficient_attention(q, k, v)

    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def rotate(x: Float[Tensor, "b n h d"], rotation: Rotation) -> Float[Tensor, "b n h d"]:
    """Rotate each pair of features (i, i + d/2) by its token's angle (RoPE: Su et al., 2104.09864, eq. 34).

    The product of a query and a key then depends only on the difference of their angles.

    Args:
        x: queries or keys.
        rotation: from ``embeddings.axial_rotation``.

    Returns:
        Rotated queries or keys in the dtype of ``x``, computed in the wider of the two dtypes.
    """
    cosine, sine = rotation[:, :, None].unbind(3)
    first, second = x.chunk(2, dim=-1)
    rotated = [first * cosine - second * sine, first * sine + second * cosine]
    return torch.cat(rotated, dim=-1).to(x.dtype)


def set_attention(module: nn.Module, backend: str) -> None:
    """Set the ``attention_backend`` of every submodule that has one.

    Raises:
        UserError: ``xformers`` is not installed.
    """
    if backend == "xformers":
        _load_xformers()  # now, because compiled code cannot import

    for part in module.modules():
        if hasattr(part, "attention_backend"):
            part.attention_backend = backend  # type: ignore[assignment]  # torch expects tensors and modules


def chosen_kernel(network: nn.Module, device: torch.device) -> str | None:
    """Name the kernel that ``auto`` takes on ``device`` for heads of ``network``, in the current precision.

    None for a network without this package's attention.
    """
    for part in network.modules():
        qkv = getattr(part, "qkv", None)
        if isinstance(qkv, nn.Linear):
            one = torch.ones(1, 1, device=device)
            dtype = (one @ one).dtype  # of a linear layer's output
            size = qkv.in_features // int(part.num_heads)  # type: ignore[arg-type]  # torch expects tensors and modules
            q = torch.ones(1, 1, 256, size, dtype=dtype, device=device, requires_grad=True)
            return SDPBackend(torch._fused_sdp_choice(q, q, q)).name.lower()

    return None


def check_attention(backend: str, device: torch.device) -> None:
    """Try attention on ``device`` once, forward and backward, in the current precision.

    Raises:
        UserError: ``backend`` cannot run there.
    """
    if backend in ("auto", "sdpa"):
        return
    if backend == "xformers":
        _load_xformers()

    square = torch.ones(64, 64, device=device, requires_grad=True)
    q = (square @ square).view(1, 64, 1, 64)  # in the dtype of a linear layer's output
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, one for each kernel that cannot run
            attention(q, q, q, backend).sum().backward()
    except RuntimeError as error:
        raise UserError(f"attention back end {backend!r} has no kernel for {q.dtype} on {device}; {_REMEDY}") from error


def _load_xformers() -> None:
    """Import xformers only when used: it takes over a second, and warns on machines without CUDA."""
    global _xformers_ops
    try:
        _xformers_ops = importlib.import_module("xformers.ops")
    except ImportError as error:
        raise UserError(f"attention back end 'xformers' cannot be imported ({error}); {_REMEDY}") from error
