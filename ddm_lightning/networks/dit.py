"""The built-in expert: a diffusion transformer with adaLN-Zero (Peebles and Xie, 2212.09748)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.embeddings import unpatchify
from ddm_lightning.networks.registry import EXPERTS
from ddm_lightning.networks.trunk import Trunk


@EXPERTS.register("dit")
class DiT(Trunk):
    """Predicts the velocity of ``x_t``; the parameters are those of ``Trunk``.

    DiT-XL/2 is width 1152, depth 28, num_heads 16, patch_size 2; DiT-B/2 is width 768, depth 12, num_heads 12.
    """

    prediction = "velocity"

    def __init__(
        self,
        *,
        x_shape: tuple[int, int, int],
        condition: ConditionSpec,
        width: int,
        depth: int,
        num_heads: int,
        patch_size: int,
        mlp_ratio: float = 4.0,
        qk_norm: bool = False,
    ) -> None:
        super().__init__(
            x_shape=x_shape,
            condition=condition,
            width=width,
            depth=depth,
            num_heads=num_heads,
            patch_size=patch_size,
            mlp_ratio=mlp_ratio,
            qk_norm=qk_norm,
            out_features=x_shape[0] * patch_size**2,
        )
        self.initialise()

    def forward(
        self, x_t: Float[Tensor, "b c h w"], t: Float[Tensor, " b"], condition: Condition | None
    ) -> Float[Tensor, "b c h w"]:
        """The velocity, in the type of ``x_t``; a ``condition`` of ``None`` is the learned null in every row.

        Raises:
            ValueError: a shape other than ``x_shape``, a ``t`` narrower than 32 bits, a condition where none is taken.
        """
        conditioning = self.conditioning(t, condition)
        patches = self.final(self.run(self.tokens(x_t), conditioning), conditioning)
        return unpatchify(patches, self.x_shape, self.patch_size).to(x_t.dtype)
