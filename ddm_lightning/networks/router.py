"""The built-in router: a diffusion transformer with a class token predicts the cluster of a noisy sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.core.registry import ROUTERS
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.flow.path import Times
from ddm_lightning.networks.blocks import Architecture, Tokens, initialise
from ddm_lightning.networks.dit import Trunk


@ROUTERS.register("router-dit")
class RouterDiT(Trunk):
    """Logits of p(cluster | x_t, t, condition), as in Decentralized Diffusion Models (2501.05450).

    A learned class token without a position joins the patches. After the last block a linear layer reads it. That layer
    starts at zero, so all clusters are equally likely. Takes the parameters of ``DiT``, and:

    Args:
        num_clusters: K.
        dropout: share of the patches dropped from each training sample, at random (torch's global generator) in every
            step (PatchDropout, Liu et al., 2208.07220). Keeps routers from overfitting small data sets, and shortens
            the sequence. No effect in ``eval`` mode.
        text_dropout: share of the entries of a text vector dropped in training (Srivastava et al., 2014). Keeps routers
            from overfitting a few thousand captions.

    Raises:
        ValueError: sizes that do not fit each other, a dropout outside [0, 1), or ``text_dropout`` without a text.
    """

    def __init__(
        self,
        *,
        x_shape: tuple[int, int, int],
        condition: ConditionSpec,
        num_clusters: int,
        dropout: float = 0.0,
        text_dropout: float = 0.0,
        **params: Any,
    ) -> None:
        if not (0 <= dropout < 1 and 0 <= text_dropout < 1):
            raise ValueError(f"dropout = {dropout} and text_dropout = {text_dropout} must be at least 0 and below 1")
        if text_dropout and condition.kind != "text":
            raise ValueError(f"text_dropout = {text_dropout} needs a text condition, not {condition.kind!r}")
        options = Architecture(**params)
        super().__init__(x_shape=x_shape, condition=condition, options=options, out_features=num_clusters)
        self.dropout = dropout
        self.text_dropout = text_dropout
        self.class_token = nn.Parameter(torch.empty(options.sizes().width))
        initialise(self)
        nn.init.normal_(self.class_token, std=0.02)

    def forward(
        self, x_t: Float[Tensor, "b c h w"], t: Times, condition: Condition | None
    ) -> Float[Tensor, "b num_clusters"]:
        """Logits of the clusters; ``condition=None`` is the learned null in every row."""
        if condition is not None and self.training and self.text_dropout:
            condition = replace(condition, values=functional.dropout(condition.values, self.text_dropout))
        conditioning = self.conditioning(t, condition)
        patches, rotation = self.tokens(x_t), self.rotation
        if self.training and self.dropout:
            kept = sample_kept(patches, self.dropout)
            patches = patches.gather(1, kept[:, :, None].expand(-1, -1, patches.shape[2]))
            rotation = None if rotation is None else rotation[0, kept]
        class_token = self.class_token.to(patches.dtype).expand(len(patches), 1, -1)
        tokens = torch.cat([class_token, patches], dim=1)
        if rotation is not None:
            first = rotation[:, :1, 0]
            still = torch.stack([torch.ones_like(first), torch.zeros_like(first)], dim=2)  # cosines 1, sines 0
            rotation = torch.cat([still, rotation], dim=1)
        tokens = self.run(tokens, conditioning, rotation, condition)
        # A copy, because FSDP2 warns about views, which it cannot track.
        return self.final(tokens[:, :1], conditioning)[:, 0].clone()


def sample_kept(tokens: Tokens, dropout: float) -> Int[Tensor, "b kept"]:
    """Indices of the tokens that each row keeps: a random ``1 - dropout`` of them, at least one, in random order."""
    b, n, _ = tokens.shape
    num_kept = max(1, round(n * (1 - dropout)))
    return torch.rand(b, n, device=tokens.device).argsort(dim=1)[:, :num_kept]
