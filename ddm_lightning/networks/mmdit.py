"""The two-stream expert: MM-DiT, the transformer of Stable Diffusion 3 (Esser et al., 2403.03206, section 4)."""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import Samples, Times
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.attention import attention
from ddm_lightning.networks.blocks import (
    Architecture,
    FinalLayer,
    Heads,
    TextTokens,
    Tokens,
    head_norm,
    initialise,
    modulate,
    plain_mlp,
)
from ddm_lightning.networks.dit import PatchTransformer
from ddm_lightning.networks.embeddings import ConditionEmbedding, TwoLayers, unpatchify

Modulation: TypeAlias = Float[Tensor, "b 1 features"]


class ReadStream(nn.Module):
    """Text stream of the last block: read by the patches, without an output of its own."""

    def __init__(self, width: int, num_heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.modulation = nn.Linear(width, 2 * width)
        self.kv = nn.Linear(width, 2 * width)
        self.key_norm = head_norm(width, num_heads, qk_norm)

    def heads(self, x: Tokens, modulation: Modulation) -> tuple[Float[Tensor, "b 0 h e"], Heads, Heads]:
        """No queries, keys and values."""
        shift, scale = modulation.chunk(2, dim=-1)
        k, v = self.kv(modulate(x, shift, scale)).unflatten(2, (2, self.num_heads, -1)).unbind(2)
        return k[:, :0], self.key_norm(k), v

    def update(self, x: Tokens, attended: Float[Tensor, "b 0 h e"], modulation: Modulation) -> None:
        """No tokens."""


class Stream(nn.Module):
    """Parts of a block that serve one kind of token: modulation, projections and MLP."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: float, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.query_norm = head_norm(width, num_heads, qk_norm)
        self.key_norm = head_norm(width, num_heads, qk_norm)
        self.mlp = plain_mlp(width, int(width * mlp_ratio))

    def heads(self, x: Tokens, modulation: Modulation) -> tuple[Heads, Heads, Heads]:
        """Queries, keys and values."""
        shift, scale = modulation.chunk(6, dim=-1)[:2]
        q, k, v = self.qkv(modulate(x, shift, scale)).unflatten(2, (3, self.num_heads, -1)).unbind(2)
        return self.query_norm(q), self.key_norm(k), v

    def update(self, x: Tokens, attended: Heads, modulation: Modulation) -> Tokens:
        """``x`` plus the gated attention, then plus the gated MLP."""
        gate, mlp_shift, mlp_scale, mlp_gate = modulation.chunk(6, dim=-1)[2:]
        x = torch.addcmul(x, gate, self.out(attended.flatten(2)))
        return torch.addcmul(x, mlp_gate, self.mlp(modulate(x, mlp_shift, mlp_scale)))


class JointBlock(nn.Module):
    """Joint attention of patches and text tokens, each with weights of their own (figure 2b).

    Compiled and sharded as one unit.
    """

    def __init__(self, width: int, num_heads: int, mlp_ratio: float, qk_norm: bool, is_last: bool) -> None:
        super().__init__()
        self.attention_backend = "auto"
        self.patches = Stream(width, num_heads, mlp_ratio, qk_norm)
        self.text: Stream | ReadStream
        if is_last:
            self.text = ReadStream(width, num_heads, qk_norm)
        else:
            self.text = Stream(width, num_heads, mlp_ratio, qk_norm)

    def forward(
        self, x: Tokens, text: TextTokens, conditioning: Float[Tensor, "b d"]
    ) -> tuple[Tokens, TextTokens | None]:
        """Patches and text tokens after the block; the last block returns None as text.

        Args:
            x: patches.
            text: text tokens.
            conditioning: embedded time and pooled text, after the SiLU that all blocks share.
        """
        of_patches = self.patches.modulation(conditioning)[:, None]
        of_text = self.text.modulation(conditioning)[:, None]
        heads = zip(self.patches.heads(x, of_patches), self.text.heads(text, of_text), strict=True)
        q, k, v = (torch.cat(of_both, dim=1) for of_both in heads)
        attended = attention(q, k, v, self.attention_backend)
        patches, others = attended.tensor_split([x.shape[1]], dim=1)
        return self.patches.update(x, patches, of_patches), self.text.update(text, others, of_text)


@EXPERTS.register("mmdit")
class MMDiT(PatchTransformer):
    """Predicts the velocity of ``x_t`` under a condition of kind ``tokens`` or ``tokens+text``.

    Stable Diffusion 3 modulates by the time and a pooled text vector. Of ``tokens``, the mean of the embedded tokens
    replaces the latter. Fixed positions are added to the patches; text tokens keep those of their encoder.

    Width 1792, depth 26, num_heads 28, patch_size 2 has 3.0 billion parameters: the size of the largest experts in
    Decentralized Diffusion Models (2501.05450), whose ensemble of eight has 24 billion.

    Args:
        x_shape: (channels, height, width) of ``x_t``; height and width in pixels or latent cells.
        condition: size and number of the text tokens, and size of the text vector.
        width: features of a token, in both streams.
        depth: number of blocks.
        num_heads: attention heads of a block.
        patch_size: edge of a square patch, in cells of ``x_t``.
        mlp_ratio: hidden features of a block's MLPs, as a multiple of ``width``.
        qk_norm: normalise queries and keys, with separate weights for each stream (section 5.3.2).

    Raises:
        ValueError: sizes that do not fit each other, or a condition of another kind.
    """

    prediction = "velocity"
    token_embedding: ConditionEmbedding

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
        if not condition.length:
            raise ValueError(f"the text stream needs condition.kind=tokens or tokens+text, not {condition.kind}")

        options = Architecture(
            width=width, depth=depth, num_heads=num_heads, patch_size=patch_size, mlp_ratio=mlp_ratio
        )
        super().__init__(x_shape, options)
        self.token_embedding = ConditionEmbedding(condition, width, keep_tokens=True)
        self.vector_embedding = None
        if condition.vector_size:
            self.vector_embedding = ConditionEmbedding(condition.pooled, width)

        self.pooled_text = TwoLayers(width, width)
        self.blocks = nn.ModuleList(
            JointBlock(width, num_heads, mlp_ratio, qk_norm, is_last=index == depth - 1) for index in range(depth)
        )
        self.final = FinalLayer(width, x_shape[0] * patch_size**2)
        initialise(self)

    def forward(self, x_t: Samples, t: Times, condition: Condition | None) -> Samples:
        """The velocity, in the dtype of ``x_t``; ``condition=None`` is the learned null in every row."""
        x = self.tokens(x_t)
        # In float32 under autocast, like the patches: FSDP2 may gather the embedding and its null in bfloat16.
        text = self.token_embedding(condition, len(x_t)).to(x.dtype)
        if self.vector_embedding is None:
            pooled = text.mean(1)
        else:
            pooled = self.vector_embedding(condition and condition.pooled, len(x_t)).to(x.dtype)

        conditioning = functional.silu(self.time_embedding(t) + self.pooled_text(pooled))
        for block in self.blocks:
            x, text = block(x, text, conditioning)

        patches = self.final(x, conditioning)
        return unpatchify(patches, x_t.shape, self.patch_size).to(x_t.dtype)
