"""Attention through one small function; the configuration chooses its back end."""

from __future__ import annotations

import importlib
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.errors import UserError

BACKENDS = ("auto", "sdpa", "xformers")

_REMEDY = "set island.attention=sdpa"


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
        backend: ``sdpa`` is torch's own, ``xformers`` its memory-efficient attention on CUDA;
            ``auto`` is ``sdpa``, which runs everywhere.

    Raises:
        UserError: unknown ``backend``, or ``xformers`` where it cannot run.
    """
    if backend in ("auto", "sdpa"):
        return functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        ).transpose(1, 2)
    if backend == "xformers":
        return _xformers(q, k, v)
    raise _unknown(backend)


def set_attention(module: nn.Module, backend: str) -> int:
    """Choose the back end of every submodule of ``module`` that has an ``attention_backend``.

    Returns:
        How many submodules listen; 0 for a network that attends in its own way, or not at all.

    Raises:
        UserError: unknown ``backend``.
    """
    if backend not in BACKENDS:
        raise _unknown(backend)
    listeners: list[Any] = [part for part in module.modules() if hasattr(part, "attention_backend")]
    for part in listeners:
        part.attention_backend = backend
    return len(listeners)


def _unknown(backend: str) -> UserError:
    return UserError(f"unknown attention back end {backend!r}; island.attention is one of: {', '.join(BACKENDS)}")


def _xformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not q.is_cuda:
        raise UserError(f"attention back end 'xformers' needs a CUDA device, not {q.device.type!r}; {_REMEDY}")
    try:
        # Only here, because importing it takes over a second and warns on machines without CUDA.
        ops = importlib.import_module("xformers.ops")
        attended: Tensor = ops.memory_efficient_attention(q, k, v)
    except ImportError as error:
        raise UserError(f"attention back end 'xformers' cannot be imported ({error}); {_REMEDY}") from error
    except NotImplementedError as error:
        shape = f"{tuple(q.shape)} {q.dtype}"
        raise UserError(f"attention back end 'xformers' has no kernel for queries {shape} here; {_REMEDY}") from error
    return attended
