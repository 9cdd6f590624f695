"""The built-in router: which cluster a noisy sample came from, by a diffusion transformer with a class token."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.registry import ROUTERS
from ddm_lightning.networks.trunk import Trunk


@ROUTERS.register("router-dit")
class RouterDiT(Trunk):
    """Logits of p(cluster | x_t, t, condition), as in Decentralized Diffusion Models (2501.05450).

    A learned class token without a position joins the patches; a linear layer, zero at the start (every cluster is
    equally likely), reads it after the last block. The parameters are those of ``Trunk``, and:

    Args:
        num_clusters: K.
        dropout: part of the patches that each training sample loses, drawn anew a step from torch's global generator
            (PatchDropout, Liu et al., 2208.07220). It regularises routers of small data sets, which otherwise learn
            their training samples by heart, and shortens the sequence; nothing is dropped in ``eval`` mode.
        text_dropout: part of the entries of a text vector that each training sample loses (Srivastava et al., 2014),
            for the same reason: a few thousand captions are soon known by heart.

    Raises:
        ValueError: sizes that do not fit each other, a dropout outside [0, 1), or one for a text that is not there.
    """

    def __init__(
        self,
        *,
        x_shape: tuple[int, int, int],
        condition: ConditionSpec,
        num_clusters: int,
        width: int,
        depth: int,
        num_heads: int,
        patch_size: int,
        mlp_ratio: float = 4.0,
        qk_norm: bool = False,
        dropout: float = 0.0,
        text_dropout: float = 0.0,
    ) -> None:
        for name, share in (("dropout", dropout), ("text_dropout", text_dropout)):
            if not 0 <= share < 1:
                raise ValueError(f"{name} = {share} must be at least 0 and below 1")
        if text_dropout and condition.kind != "text":
            raise ValueError(f"text_dropout = {text_dropout} needs a text condition, not {condition.kind!r}")
        super().__init__(
            x_shape=x_shape,
            condition=condition,
            width=width,
            depth=depth,
            num_heads=num_heads,
            patch_size=patch_size,
            mlp_ratio=mlp_ratio,
            qk_norm=qk_norm,
            out_features=num_clusters,
        )
        self.dropout = dropout
        self.text_dropout = text_dropout
        self.class_token = nn.Parameter(torch.empty(width))
        self.initialise()

    def initialise(self) -> None:
        """As ``Trunk``, and a normal(0.02) class token."""
        super().initialise()
        nn.init.normal_(self.class_token, std=0.02)

    def forward(
        self, x_t: Float[Tensor, "b c h w"], t: Float[Tensor, " b"], condition: Condition | None
    ) -> Float[Tensor, "b num_clusters"]:
        """The logits; a ``condition`` of ``None`` is the learned null in every row.

        Raises:
            ValueError: a shape other than ``x_shape``, a ``t`` narrower than 32 bits, a condition where none is taken.
        """
        if condition is not None and self.training and self.text_dropout:
            condition = replace(condition, values=functional.dropout(condition.values, self.text_dropout))
        conditioning = self.conditioning(t, condition)
        patches = self.tokens(x_t)
        if self.training and self.dropout:
            patches = drop_tokens(patches, self.dropout)
        class_token = self.class_token.to(patches.dtype).expand(len(patches), 1, -1)
        tokens = self.run(torch.cat([class_token, patches], dim=1), conditioning)
        logits: Tensor = self.final(tokens[:, :1], conditioning)[:, 0]
        return logits


def drop_tokens(tokens: Float[Tensor, "b n d"], dropout: float) -> Float[Tensor, "b kept d"]:
    """A random ``1 - dropout`` of each row's tokens, at least one, in random order."""
    b, n, d = tokens.shape
    num_kept = max(1, round(n * (1 - dropout)))
    kept = torch.rand(b, n, device=tokens.device).argsort(dim=1)[:, :num_kept]
    return tokens.gather(1, kept[:, :, None].expand(-1, -1, d))
