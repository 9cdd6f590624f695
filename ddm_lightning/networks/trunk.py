"""What the expert and the router share: from a noisy sample to tokens, blocks, and the start of training."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.blocks import DiTBlock, FinalLayer
from ddm_lightning.networks.embeddings import ConditionEmbedding, TimestepEmbedding, patchify, sincos_positions


class Trunk(nn.Module):
    """The parts of a diffusion transformer (Peebles and Xie, 2212.09748), which ``DiT`` and ``RouterDiT`` put together.

    Whoever extends it calls ``initialise`` when all its own parameters are there.

    Args:
        x_shape: (channels, height, width) of ``x_t``; height and width in pixels or latent cells.
        condition: what the network is conditioned on.
        width: features of a token.
        depth: number of blocks.
        num_heads: attention heads of a block.
        patch_size: edge of a square patch, in cells of ``x_t``.
        mlp_ratio: hidden features of a block's MLP over ``width``.
        qk_norm: whether queries and keys are normalised.
        out_features: outputs a token.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    positions: Tensor

    def __init__(
        self,
        *,
        x_shape: tuple[int, int, int],
        condition: ConditionSpec,
        width: int,
        depth: int,
        num_heads: int,
        patch_size: int,
        mlp_ratio: float,
        qk_norm: bool,
        out_features: int,
    ) -> None:
        super().__init__()
        for name, size in (("width", width), ("depth", depth), ("num_heads", num_heads), ("patch_size", patch_size)):
            if size < 1:
                raise ValueError(f"{name} = {size} must be at least 1")
        channels, height_cells, width_cells = x_shape
        if height_cells % patch_size or width_cells % patch_size:
            raise ValueError(
                f"patch_size = {patch_size} must divide the {height_cells}x{width_cells} cells of a sample"
            )
        if width % num_heads:
            raise ValueError(f"num_heads = {num_heads} must divide width = {width}")
        if mlp_ratio * width < 1:
            raise ValueError(f"mlp_ratio = {mlp_ratio} leaves the MLP without features")
        self.x_shape = x_shape
        self.patch_size = patch_size
        self.patch_embedding = nn.Linear(channels * patch_size**2, width)
        positions = sincos_positions(width, height_cells // patch_size, width_cells // patch_size)
        self.register_buffer("positions", positions, persistent=False)
        self.time_embedding = TimestepEmbedding(width)
        self.condition_embedding = None if condition.kind == "none" else ConditionEmbedding(condition, width)
        self.blocks = nn.ModuleList(DiTBlock(width, num_heads, mlp_ratio, qk_norm) for _ in range(depth))
        self.final = FinalLayer(width, out_features)

    def initialise(self) -> None:
        """Draw all weights anew from torch's global generator, by adaLN-Zero (section 3.2) and DiT's own ranges.

        Linear layers are Xavier-uniform with zero bias, embeddings normal(0.02), modulations and the head zero.
        """
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                nn.init.zeros_(part.bias)
        for part in self.modules():
            if isinstance(part, (TimestepEmbedding, ConditionEmbedding, DiTBlock, FinalLayer)):
                part.initialise()

    def tokens(self, x_t: Float[Tensor, "b c h w"]) -> Float[Tensor, "b n d"]:
        """Embedded patches with their positions.

        Raises:
            ValueError: ``x_t`` is not of the shape that the network was built for.
        """
        if x_t.shape[1:] != self.x_shape:
            raise ValueError(f"the network reads samples of shape {self.x_shape}, not {tuple(x_t.shape[1:])}")
        patches = patchify(x_t, self.patch_size).to(self.patch_embedding.weight.dtype)
        embedded: Tensor = self.patch_embedding(patches) + self.positions
        return embedded

    def conditioning(self, t: Float[Tensor, " b"], condition: Condition | None) -> Float[Tensor, "b d"]:
        """The vector that modulates all blocks; its SiLU is taken once, here.

        Raises:
            ValueError: a condition for a network that takes none.
        """
        summed: Tensor = self.time_embedding(t)
        if self.condition_embedding is not None:
            summed = summed + self.condition_embedding(condition, len(t))
        elif condition is not None:
            raise ValueError("the network was built without a condition and is given one; pass None")
        return functional.silu(summed)

    def run(self, tokens: Float[Tensor, "b n d"], conditioning: Float[Tensor, "b d"]) -> Float[Tensor, "b n d"]:
        """``tokens`` through all blocks."""
        for block in self.blocks:
            tokens = block(tokens, conditioning)
        return tokens
