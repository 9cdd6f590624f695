"""Build AdamW, compact or not, or Muon, with weight decay on matrices only, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.networks.blocks import is_muon_matrix
from ddm_lightning.training.compact import CompactAdamW


def build_optimizer(network: nn.Module, train: TrainConfig, key: tuple[int, str] = (0, "")) -> Optimizer:
    """Build fused AdamW, or Muon for the blocks' matrices; only parameters of two or more dimensions decay.

    Args:
        network: the network; weights in bfloat16 are rounded stochastically.
        train: optimizer, rate and decay.
        key: seed and member, which key the rounding.

    Raises:
        ValueError: Muon for a network without such matrices (``is_muon_matrix``).
    """
    by_muon = train.optimizer == "muon"
    hidden: dict[Tensor, int] = {}
    matrices = []
    vectors = []
    for name, p in network.named_parameters():
        if by_muon and p.requires_grad and is_muon_matrix(name, p):
            hidden[p] = _FUSED.get(name.split(".")[-2], 1)
        elif p.requires_grad and p.ndim >= 2:
            matrices.append(p)
        elif p.requires_grad:
            vectors.append(p)

    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    is_half = any(p.dtype == torch.bfloat16 for p in [*matrices, *vectors])
    eight_bits = train.optimizer == "adamw-8bit"
    if eight_bits or is_half:
        return CompactAdamW(groups, train.learning_rate, key, eight_bits=eight_bits)

    if not by_muon:
        return AdamW(groups, lr=train.learning_rate, fused=True)

    return MuonWithAdamW(hidden, train.weight_decay, groups, lr=train.learning_rate)


def clip_in_step(optimizer: Optimizer, parameters: Iterable[nn.Parameter], limit: float | None) -> Float[Tensor, ""]:
    """Let the next step of ``optimizer`` clip by the global norm, which spares a pass over all gradients.

    Its fused kernel divides each gradient by ``grad_scale``. The step equals one after torch's ``clip_grad_norm_``.

    Args:
        optimizer: from ``build_optimizer``.
        parameters: with their gradients, which stay as they are until the step; may be sharded.
        limit: largest norm; None for no clipping.

    Returns:
        The norm before clipping, over all ranks.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients and gradients[0].dtype == torch.bfloat16:
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    else:
        norm = nn.utils.get_total_norm(gradients)

    if isinstance(norm, DTensor):
        norm = norm.full_tensor()

    if limit is not None:
        # Fused kernels read no other dtype.
        optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0).float()  # type: ignore[attr-defined]

    return norm


def learning_rate_factor(train: TrainConfig, step: int) -> float:
    """Return the factor on the peak learning rate at the optimizer step ``step``, counted from 0."""
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps

    progress = min(1.0, (step - train.warmup_steps) / max(1, train.max_steps - train.warmup_steps))
    if train.schedule == "linear":
        return 1.0 - progress
    if train.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))

    return 1.0


def build_schedule(optimizer: Optimizer, train: TrainConfig) -> LambdaLR:
    """Build the scheduler of ``learning_rate_factor``; it steps once per optimizer step."""
    return LambdaLR(optimizer, partial(learning_rate_factor, train))


_BUFFER = "momentum_buffer"
_FUSED = {"qkv": 3, "kv": 2, "gate_up": 2}
"""Fused layers by their name in a block, and how many layers of equal size each one fuses."""


class MuonWithAdamW(Optimizer):
    """Muon and fused AdamW that share parameter groups and state, so that they are saved as one optimizer.

    Muon orthogonalises each layer of a fused matrix on its own: queries, keys and values apart. Its updates are scaled
    to the size of AdamW's (Liu et al., 2502.16982), so that both share one learning rate and one weight decay.

    Args:
        muon: matrices, each with its number of stacked layers.
        weight_decay: weight decay of these matrices.
        adamw: parameter groups of all other parameters.
        lr: learning rate.
    """

    found_inf: Tensor | None = None
    """1.0, on the device, to skip this step; AdamW's fused kernel reads it."""
    grad_scale: Tensor | None = None
    """Divisor of all gradients in this step, on the device; AdamW's fused kernel reads it, too."""

    def __init__(
        self, muon: Mapping[Tensor, int], weight_decay: float, adamw: Iterable[dict[str, Any]], lr: float
    ) -> None:
        self._num_layers = muon
        self._adamw = AdamW(adamw, lr=lr, fused=True)
        matrices = {"params": list(muon), "weight_decay": weight_decay, "lr": lr}
        super().__init__([matrices, *self._adamw.param_groups], {"lr": lr})
        self._adamw.param_groups = self.param_groups[1:]
        self._adamw.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both; if ``found_inf`` is 1, change neither weights nor moments. The host does not wait."""
        loss = None
        if closure is not None:
            loss = closure()

        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]  # its fused kernel reads both
        self._adamw.grad_scale = self.grad_scale  # type: ignore[attr-defined]
        self._adamw.step()
        self._muon_step()
        return loss

    @torch.no_grad()
    def _muon_step(self) -> None:
        """Take Muon's step; it cannot be skipped on the device, so restore the matrices from copies if it must be."""
        matrices = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        if self.grad_scale is not None:
            for matrix in matrices:
                matrix.grad.div_(self.grad_scale)

        if self.found_inf is None:
            self._step_by_layer(matrices)
            return

        counts = self.found_inf == 0
        before = [matrix.clone() for matrix in matrices]
        for matrix in matrices:
            buffer = self.state[matrix].get(_BUFFER)
            # With a gradient equal to the momentum, the momentum does not change.
            if buffer is None:
                still = torch.zeros_like(matrix)
            else:
                still = buffer

            matrix.grad.copy_(torch.where(counts, matrix.grad, still))

        self._step_by_layer(matrices)
        for matrix, old in zip(matrices, before, strict=True):
            matrix.copy_(torch.where(counts, matrix, old))

    def _step_by_layer(self, matrices: list[Tensor]) -> None:
        """Let torch's Muon take a step of views of the layers, which share memory with the matrices and momenta."""
        layers: list[Tensor] = []
        momenta: list[Tensor] = []
        for matrix in matrices:
            num = self._num_layers[matrix]
            state = self.state[matrix]
            if _BUFFER not in state:
                state[_BUFFER] = torch.zeros_like(matrix)

            assert matrix.grad is not None
            parts = matrix.detach().chunk(num)
            for part, gradient in zip(parts, matrix.grad.chunk(num), strict=True):
                part.grad = gradient

            layers += parts
            momenta += state[_BUFFER].chunk(num)

        group = self.param_groups[0]
        muon = Muon(layers, group["lr"], group["weight_decay"], adjust_lr_fn="match_rms_adamw")
        for layer, momentum in zip(layers, momenta, strict=True):
            muon.state[layer][_BUFFER] = momentum

        muon.step()
