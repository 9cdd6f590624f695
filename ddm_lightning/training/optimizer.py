"""AdamW with decay on matrices only, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from ddm_lightning.config import TrainConfig


def build_optimizer(network: nn.Module, train: TrainConfig) -> AdamW:
    """Fused AdamW; weight decay applies to parameters of two or more dimensions."""
    parameters = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([g for g in groups if g["params"]], lr=train.learning_rate, fused=True)


def numbered_by_module(state: dict[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """An optimizer's ``state_dict`` whose parameters are numbered in the order of ``module.parameters()``.

    PyTorch numbers them in the order of the groups. A sharded training, which looks for them by name, takes the
    numbers for those of the module (Lightning 2.6) and would give a parameter the moments of another one.
    """
    number = {parameter: index for index, parameter in enumerate(module.parameters())}
    saved = [index for group in state["param_groups"] for index in group["params"]]
    live = [number[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    renumbered = dict(zip(saved, live, strict=True))
    return {
        **state,
        "state": {renumbered[index]: entry for index, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [renumbered[index] for index in group["params"]]} for group in state["param_groups"]
        ],
    }


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


def build_schedule(optimizer: torch.optim.Optimizer, train: TrainConfig) -> LambdaLR:
    """``learning_rate_factor`` as a scheduler that steps once an optimizer step."""
    return LambdaLR(optimizer, learning_rate_factor(train))
