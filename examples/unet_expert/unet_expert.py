"""A small convolutional expert: one level down, one up, and a skip connection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.embeddings import ConditionEmbedding, TimestepEmbedding


class SmallUNet(nn.Module):
    """Predicts the noise of ``x_t``.

    Args:
        x_shape: (channels, height, width) of ``x_t``; height and width must be even.
        condition: kind and size of the condition.
        width: channels at full resolution.
    """

    prediction = "epsilon"

    def __init__(self, *, x_shape: tuple[int, int, int], condition: ConditionSpec, width: int = 32) -> None:
        super().__init__()
        if any(cells % 2 for cells in x_shape[1:]):
            raise ValueError(f"height and width must be even, not {x_shape[1:]}")
        self.into = nn.Conv2d(x_shape[0], width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, x_shape[0], 3, padding=1)
        self.time = TimestepEmbedding(2 * width)
        self.embedding = None if condition.kind == "none" else ConditionEmbedding(condition, 2 * width)

    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """The noise; ``condition=None`` is the learned null in every row."""
        shift = self.time(t)
        if self.embedding is not None:
            shift = shift + self.embedding(condition, len(x_t))
        skip = torch.relu(self.into(x_t))
        low = torch.relu(self.down(skip) + shift[:, :, None, None])
        low = low + torch.relu(self.middle(low))
        return self.out(torch.cat([skip, self.up(low)], dim=1))
