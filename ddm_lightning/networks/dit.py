"""The built-in expert: a diffusion transformer with adaLN-Zero (Peebles and Xie, 2212.09748)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.embeddings import unpatchify
from ddm_lightning.networks.recipe import Recipe, choose_size
from ddm_lightning.networks.trunk import Trunk


@EXPERTS.register("dit")
class DiT(Trunk):
    """Predicts the velocity of ``x_t``.

    DiT-XL/2 is size XL, patch_size 2. With modulation ``single`` and CLIP's 77 x 768 tokens it is the expert of Paris
    (2510.03434) with 608M parameters instead of 605M: its last layer projects the modulation from the time (2.7M),
    while PixArt-alpha adds the time to a table.

    >>> import torch
    >>> network = DiT(x_shape=(4, 32, 32), condition=ConditionSpec("class", 1000), size="S", patch_size=4)
    >>> x_t, t, classes = torch.randn(2, 4, 32, 32), torch.rand(2), torch.tensor([1, 2])
    >>> network(x_t, t, Condition.of(classes)).shape
    torch.Size([2, 4, 32, 32])

    Args:
        x_shape: (channels, height, width) of ``x_t``; height and width in pixels or latent cells.
        condition: kind and size of the condition.
        patch_size: edge of a square patch, in cells of ``x_t``.
        size: ``S``, ``B``, ``L`` or ``XL`` (``recipe.SIZES``), instead of the next three.
        width: features of a token.
        depth: number of blocks.
        num_heads: attention heads of a block.
        mlp_ratio, qk_norm, rope, mlp, norm, modulation: see ``recipe.Recipe``.

    Raises:
        ValueError: sizes that do not fit each other, or an unknown choice.
    """

    prediction = "velocity"

    def __init__(
        self,
        *,
        x_shape: tuple[int, int, int],
        condition: ConditionSpec,
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
    ) -> None:
        super().__init__(
            x_shape=x_shape,
            condition=condition,
            size=choose_size(size, width=width, depth=depth, num_heads=num_heads),
            patch_size=patch_size,
            recipe=Recipe(mlp_ratio, qk_norm, rope, mlp, norm, modulation),
            out_features=x_shape[0] * patch_size**2,
        )
        self.initialise()

    def forward(
        self, x_t: Float[Tensor, "b c h w"], t: Float[Tensor, " b"], condition: Condition | None
    ) -> Float[Tensor, "b c h w"]:
        """The velocity, in the dtype of ``x_t``; ``condition=None`` is the learned null in every row.

        Raises:
            ValueError: a shape other than ``x_shape``, a ``t`` narrower than 32 bits, or a condition for kind ``none``.
        """
        conditioning = self.conditioning(t, condition)
        tokens = self.run(self.tokens(x_t), conditioning, self.rotation, condition)
        return unpatchify(self.final(tokens, conditioning), self.x_shape, self.patch_size).to(x_t.dtype)
