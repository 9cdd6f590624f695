"""Alignment of an expert's hidden tokens with the features that ``prepare`` clusters by."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.member import Member


class Alignment(nn.Module):
    """Projection of hidden tokens to the features of the clean image (REPA: Yu et al., 2410.06940), for training alone.

    The paper compares each patch with a patch of the encoder. Here an image has one pooled vector of features, so its
    mean token is compared. The head is an MLP of three layers, as in the paper, but no wider than the network.

    Args:
        network: with ``blocks``, whose outputs are tokens [b n d], or tuples that begin with them, and ``width`` d.
        member: its ``alignment``; its seed gives the head's initial weights.
        num_features: entries of the features.

    Raises:
        UserError: as ``check_alignment``.
    """

    def __init__(self, network: nn.Module, member: Member, num_features: int) -> None:
        super().__init__()
        config = member.alignment
        assert config is not None
        check_alignment(network, config.depth)
        self._weight, self._until_step = config.weight, config.until_step
        self._tokens: Float[Tensor, "b n d"] | None = None
        width = int(network.width)  # type: ignore[arg-type]  # checked by ``check_alignment``
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_generator(member.seed, "initial weights", "alignment").initial_seed())
            first, second, last = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, num_features)
        self.head = nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), last)
        network.blocks[config.depth - 1].register_forward_hook(self._keep)  # type: ignore[index, union-attr]

    def _keep(self, _block: nn.Module, _inputs: Any, output: Any) -> None:
        """Keep the tokens of a training step; a block of several streams returns the patches first."""
        if self.training:
            self._tokens = output[0] if isinstance(output, tuple) else output

    def forward(self, features: Float[Tensor, "b f"]) -> Float[Tensor, " b"]:
        """Cosine similarity of each image's features with the projected tokens of the last forward pass, in fp32."""
        tokens, self._tokens = self._tokens, None
        assert tokens is not None
        projected = self.head(tokens.mean(1))
        return F.cosine_similarity(projected.float(), features.float(), dim=1)

    def weight_at(self, step: int) -> float:
        """Weight in the loss of optimizer step ``step``, counted from 0.

        After ``until_step`` it is 0, but the head stays in the graph: DDP expects gradients of all parameters.
        """
        return self._weight if self._until_step is None or step < self._until_step else 0.0


def check_alignment(network: nn.Module, depth: int) -> None:
    """Check that ``network`` has tokens after ``depth`` blocks.

    Raises:
        UserError: it has not.
    """
    num_blocks = len(getattr(network, "blocks", ()))
    problem = f"the expert's network has only {num_blocks} blocks; lower it" if depth > num_blocks else None
    if not num_blocks or not hasattr(network, "width"):
        problem = "the expert's network has no 'blocks' of tokens and their 'width'; set expert.alignment.weight=0"
    if problem:
        raise UserError(f"key 'expert.alignment.depth' = {depth}: {problem}")
