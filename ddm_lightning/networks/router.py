"""The built-in router: which cluster a noisy sample came from, by a diffusion transformer with a class token."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.core.registry import ROUTERS
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.recipe import Recipe, choose_size
from ddm_lightning.networks.trunk import Trunk


@ROUTERS.register("router-dit")
class RouterDiT(Trunk):
    """Logits of p(cluster | x_t, t, condition), as in Decentralized Diffusion Models (2501.05450).

    A learned class token without a position joins the patches; a linear layer, zero at the start (every cluster is
    equally likely), reads it after the last block. The parameters are those of ``DiT``, and:

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
        patch_size: int,
        size: str | None = None,
        width: int | None = None,
        depth: int | None = None,
        num_heads: int | None = None,
        mlp_ratio: float = 4.0,
        qk_norm: bool = False,
        rope: bool = False,
        mlp: str = "gelu",
        norm: str = "layer",
        modulation: str = "zero",
        dropout: float = 0.0,
        text_dropout: float = 0.0,
    ) -> None:
        for name, share in (("dropout", dropout), ("text_dropout", text_dropout)):
            if not 0 <= share < 1:
                raise ValueError(f"{name} = {share} must be at least 0 and below 1")
        if text_dropout and condition.kind != "text":
            raise ValueError(f"text_dropout = {text_dropout} needs a text condition, not {condition.kind!r}")
        chosen = choose_size(size, width=width, depth=depth, num_heads=num_heads)
        super().__init__(
            x_shape=x_shape,
            condition=condition,
            size=chosen,
            patch_size=patch_size,
            recipe=Recipe(mlp_ratio, qk_norm, rope, mlp, norm, modulation),
            out_features=num_clusters,
        )
        self.dropout = dropout
        self.text_dropout = text_dropout
        self.class_token = nn.Parameter(torch.empty(chosen.width))
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
        patches, rotation = self.tokens(x_t), self.rotation
        if self.training and self.dropout:
            kept = draw_kept(patches, self.dropout)
            patches = pick(patches, kept)
            rotation = None if rotation is None else rotation[0, kept]
        class_token = self.class_token.to(patches.dtype).expand(len(patches), 1, -1)
        tokens = torch.cat([class_token, patches], dim=1)
        if rotation is not None:
            rotation = torch.cat([_unturned(rotation), rotation], dim=1)
        tokens = self.run(tokens, conditioning, rotation, condition)
        # A copy, because FSDP2 warns of views, which it can't watch.
        logits: Tensor = self.final(tokens[:, :1], conditioning)[:, 0].clone()
        return logits


def draw_kept(tokens: Float[Tensor, "b n d"], dropout: float) -> Int[Tensor, "b kept"]:
    """Which of each row's tokens stay: a random ``1 - dropout`` of them, at least one, in random order."""
    b, n, _ = tokens.shape
    num_kept = max(1, round(n * (1 - dropout)))
    return torch.rand(b, n, device=tokens.device).argsort(dim=1)[:, :num_kept]


def pick(tokens: Float[Tensor, "b n d"], kept: Int[Tensor, "b kept"]) -> Float[Tensor, "b kept d"]:
    """The tokens at ``kept``, row by row."""
    return tokens.gather(1, kept[:, :, None].expand(-1, -1, tokens.shape[2]))


def _unturned(rotation: Float[Tensor, "r n 2 half"]) -> Float[Tensor, "r 1 2 half"]:
    """The rotation by no angle, of a class token: cosines 1, sines 0."""
    return torch.stack([torch.ones_like(rotation[:, :1, 0]), torch.zeros_like(rotation[:, :1, 0])], dim=2)
