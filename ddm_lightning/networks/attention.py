"""Attention through one small function; the configuration chooses its back end."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

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
"""Of torch's own."""
BACKENDS = ("auto", "sdpa", *_KERNELS, "xformers")

_REMEDY = "set island.attention=sdpa"
_loaded: Any = None  # of xformers.ops


def attention(
    q: Float[Tensor, "b n h d"],
    k: Float[Tensor, "b m h d"],
    v: Float[Tensor, "b m h d"],
    backend: str = "auto",
) -> Float[Tensor, "b n h d"]:
    """Softmax attention, ``softmax(q kᵀ / √d) v`` head by head (Vaswani et al., 1706.03762, eq. 1).

    Args:
        q: queries.
        k: keys.
        v: values.
        backend: ``sdpa`` is torch's own by a kernel of its choice, ``flash``, ``cudnn`` and ``efficient`` are its
            kernels, ``xformers`` its memory-efficient attention on CUDA; ``auto`` is ``sdpa``, which runs everywhere.

    Raises:
        UserError: unknown ``backend``, or ``xformers`` where it cannot run.
        RuntimeError: a kernel of torch's where it cannot run (``check_attention``).
    """
    if backend in _KERNELS:
        with sdpa_kernel(_KERNELS[backend]):
            return attention(q, k, v, "sdpa")
    if backend in ("auto", "sdpa"):
        return functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ).transpose(1, 2)
    if backend == "xformers":
        return _xformers(q, k, v)
    raise _unknown(backend)


def rotate(x: Float[Tensor, "b n h d"], rotation: Float[Tensor, "#b n 2 half"]) -> Float[Tensor, "b n h d"]:
    """Turn each pair of features (i, i + d/2) of queries or keys by its token's angle (Su et al., 2104.09864, eq. 34).

    A query's product with a key then depends on the difference of their angles alone.

    Args:
        x: queries or keys.
        rotation: cosines, then sines, as ``embeddings.axial_rotation`` gives them; a row of ``x`` may have its own.

    Returns:
        The turned ones, in the type of ``x``; the product is taken in the wider of the two types.
    """
    cosine, sine = rotation[:, :, None].unbind(3)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1).to(x.dtype)


def set_attention(module: nn.Module, backend: str) -> int:
    """Choose the back end of every submodule of ``module`` that has an ``attention_backend``.

    Returns:
        How many submodules listen; 0 for a network that attends in its own way, or not at all.

    Raises:
        UserError: unknown ``backend``, or ``xformers`` where it is not installed.
    """
    if backend not in BACKENDS:
        raise _unknown(backend)
    if backend == "xformers":
        _load_ahead()
    listeners: list[Any] = [part for part in module.modules() if hasattr(part, "attention_backend")]
    for part in listeners:
        part.attention_backend = backend
    return len(listeners)


def check_attention(backend: str, device: torch.device) -> None:
    """Attend once, forward and backward, by a kernel that may not run on ``device`` in the precision in force.

    Raises:
        UserError: ``backend`` cannot run there.
    """
    if backend in ("auto", "sdpa"):
        return
    square = torch.ones(64, 64, device=device, requires_grad=True)
    q = (square @ square).view(1, 64, 1, 64)  # of the type that a linear layer gives
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a line of torch's for each kernel that cannot run
            attention(q, q, q, backend).sum().backward()
    except RuntimeError as error:
        raise UserError(f"attention back end {backend!r} has no kernel for {q.dtype} on {device}; {_REMEDY}") from error


def _unknown(backend: str) -> UserError:
    return UserError(f"unknown attention back end {backend!r}; island.attention is one of: {', '.join(BACKENDS)}")


def _load_ahead() -> None:
    """Import what compiled code cannot import."""
    global _loaded
    try:
        _loaded = importlib.import_module("xformers.ops")
    except ImportError as error:
        raise UserError(f"attention back end 'xformers' cannot be imported ({error}); {_REMEDY}") from error


def _xformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not q.is_cuda:
        raise UserError(f"attention back end 'xformers' needs a CUDA device, not {q.device.type!r}; {_REMEDY}")
    try:
        # Only here, because importing it takes over a second and warns on machines without CUDA.
        ops = _loaded if torch.compiler.is_compiling() else importlib.import_module("xformers.ops")
        attended: Tensor = ops.memory_efficient_attention(q, k, v)
    except ImportError as error:
        raise UserError(f"attention back end 'xformers' cannot be imported ({error}); {_REMEDY}") from error
    except NotImplementedError as error:
        shape = f"{tuple(q.shape)} {q.dtype}"
        raise UserError(f"attention back end 'xformers' has no kernel for queries {shape} here; {_REMEDY}") from error
    return attended
