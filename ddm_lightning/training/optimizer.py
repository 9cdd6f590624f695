"""AdamW or Muon with decay on matrices only, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ddm_lightning.config import TrainConfig
from ddm_lightning.training.muon import MuonWithAdamW, is_muon_matrix, num_layers


def build_optimizer(network: nn.Module, train: TrainConfig) -> Optimizer:
    """Fused AdamW, or Muon for what it is for; weight decay applies to parameters of two or more dimensions.

    Raises:
        ValueError: Muon for a network that has nothing for it (``has_muon_matrices``).
    """
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    hidden: dict[Tensor, int] = {}
    if train.optimizer == "muon":
        hidden = {p: num_layers(name) for name, p in named if is_muon_matrix(name, p)}
    others = [p for _, p in named if p not in hidden]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "adamw":
        return AdamW(groups, lr=train.learning_rate, fused=True)
    return MuonWithAdamW(hidden, train.weight_decay, groups, lr=train.learning_rate)


def learning_rate_factor(train: TrainConfig) -> Callable[[int], float]:
    """The factor on the peak learning rate at optimizer step n (counted from 0)."""

    def factor(step: int) -> float:
        if step < train.warmup_steps:
            return (step + 1) / train.warmup_steps
        progress = (step - train.warmup_steps) / max(1, train.max_steps - train.warmup_steps)
        if train.schedule == "linear":
            return max(0.0, 1.0 - progress)
        if train.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
        return 1.0

    return factor


def build_schedule(optimizer: Optimizer, train: TrainConfig) -> LambdaLR:
    """``learning_rate_factor`` as a scheduler that steps once an optimizer step."""
    return LambdaLR(optimizer, learning_rate_factor(train))
