"""Diffusion transformers with adaLN-Zero (Peebles and Xie, 2212.09748): built-in expert and router on one trunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import Samples, Times
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks import embeddings
from ddm_lightning.networks.attention import Rotation
from ddm_lightning.networks.blocks import (
    Architecture,
    DiTBlock,
    ExpertArchitecture,
    FinalLayer,
    Tokens,
    initialise,
)


class PatchTransformer(embeddings.Conditioned):
    """Base of the transformers: embeddings of patches and time, for any kind of block.

    It takes images of any height and width that ``patch_size`` divides; ``x_shape`` is the reference of their positions
    (``embeddings.coordinates``). A subclass adds ``blocks`` and calls ``initialise`` once all parameters exist.

    Args:
        x_shape: (channels, height, width) of ``x_t``; height and width in pixels or latent cells.
        options: patch size and network size. With ``rope``, blocks rotate queries and keys by ``rotation``; otherwise
            ``positions`` are added to the patches.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    positions: Tensor | None
    rotation: Float[Tensor, "1 n 2 half"] | None

    def __init__(self, x_shape: tuple[int, int, int], options: Architecture) -> None:
        super().__init__()
        _, width, num_heads = options.sizes()
        self.patch_size = options.patch_size
        self.grid = self._grid_of(x_shape)
        if width < 1 or width % num_heads:
            raise ValueError(f"width = {width} must be at least 1, and num_heads = {num_heads} must divide it")

        self.patch_embedding = nn.Linear(x_shape[0] * self.patch_size**2, width)
        positions = None
        rotation = None
        if options.rope:
            self._table = partial(embeddings.axial_rotation, width // num_heads, reference=self.grid)
            rotation = self._table(*self.grid)
        else:
            self._table = partial(embeddings.sincos_positions, width, reference=self.grid)
            positions = self._table(*self.grid)

        self.register_buffer("positions", positions, persistent=False)
        self.register_buffer("rotation", rotation, persistent=False)
        self.time_embedding = embeddings.TimestepEmbedding(width)

    def _grid_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns of patches of a shape (…, height, width)."""
        height, width = shape[-2:]
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(f"patch_size = {self.patch_size} must divide the {height}x{width} cells of a sample")

        return height // self.patch_size, width // self.patch_size

    def table(self, name: str, x_t: Float[Tensor, "b c h w"]) -> Tensor | None:
        """The buffer ``name`` (``positions`` or ``rotation``) for the patches of ``x_t``; None if not in use.

        The first images of a shape make a buffer, which stays on their device.

        Raises:
            ValueError: ``patch_size`` does not divide the height and width.
        """
        own: Tensor | None = getattr(self, name)
        rows, columns = self._grid_of(x_t.shape)
        if own is None or (rows, columns) == self.grid:
            return own

        key = f"{name}_{rows}x{columns}"
        if not hasattr(self, key):
            with torch.inference_mode(False):  # training may follow, which cannot use tensors of that mode
                self.register_buffer(key, self._table(rows, columns).to(own), persistent=False)

        made: Tensor = getattr(self, key)
        return made

    def tokens(self, x_t: Float[Tensor, "b c h w"]) -> Tokens:
        """Embed the patches; add positions unless RoPE is used.

        Raises:
            ValueError: as ``table``.
        """
        positions = self.table("positions", x_t)
        patches = embeddings.patchify(x_t, self.patch_size).to(self.patch_embedding.weight.dtype)
        embedded: Tensor = self.patch_embedding(patches)
        if positions is not None:
            return embedded + positions

        # Float32 even under autocast, as with positions, so that blocks do not sum in half precision.
        assert self.rotation is not None
        return embedded.to(self.rotation.dtype)


class Trunk(PatchTransformer):
    """Parts of a diffusion transformer (Peebles and Xie, 2212.09748), assembled by ``DiT`` and ``RouterDiT``.

    A text vector or a class modulates the blocks together with the time. Text tokens enter each block by
    cross-attention instead, as in PixArt-alpha (Chen et al., 2310.00426); then only the time modulates.

    Args:
        x_shape: (channels, height, width) of ``x_t``; height and width in pixels or latent cells.
        condition: kind and size of the condition.
        options: patch size, network size and kinds of layers.
        out_features: outputs per token.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    params: ClassVar[type] = Architecture
    """Dataclass of the ``**params`` of a subclass's constructor, for ``Registry.check``."""

    def __init__(
        self, *, x_shape: tuple[int, int, int], condition: ConditionSpec, options: Architecture, out_features: int
    ) -> None:
        super().__init__(x_shape, options)
        depth, width, num_heads = options.sizes()
        reads_tokens = condition.length > 0
        self.add_condition(condition, width)
        self.shared_modulation = None
        if options.modulation == "single":
            self.shared_modulation = nn.Linear(width, 6 * width)

        self.blocks = nn.ModuleList(DiTBlock(width, num_heads, options, reads_tokens) for _ in range(depth))
        self.final = FinalLayer(width, out_features, options.norm)

    def run(
        self,
        tokens: Tokens,
        conditioning: Float[Tensor, "b d"],
        rotation: Rotation | None,
        condition: Condition | None,
    ) -> Tokens:
        """The tokens after all blocks.

        Args:
            tokens: patches and other tokens.
            conditioning: output of ``conditioning``.
            rotation: angles of ``tokens``; None unless positions are rotary.
            condition: text tokens for cross-attention; other kinds are part of ``conditioning``.
        """
        context = None
        if self.token_embedding is not None:
            context = self.token_embedding(condition, len(tokens))
        if self.shared_modulation is not None:
            conditioning = self.shared_modulation(conditioning)

        for block in self.blocks:
            tokens = block(tokens, conditioning, rotation, context)

        return tokens


@EXPERTS.register("dit")
class DiT(Trunk):
    """Predicts the velocity of ``x_t``, or its noise or data.

    DiT-XL/2 is size XL, patch_size 2. With modulation ``single`` and CLIP's 77 x 768 tokens it is the expert of Paris
    (2510.03434) with 608M parameters instead of 605M: here the last layer projects the time to its modulation (2.7M);
    in PixArt-alpha it adds the time to a table.

    >>> import torch
    >>> network = DiT(x_shape=(4, 32, 32), condition=ConditionSpec("class", 1000), size="S", patch_size=4)
    >>> x_t, t, classes = torch.randn(2, 4, 32, 32), torch.rand(2), torch.tensor([1, 2])
    >>> network(x_t, t, Condition.of(classes)).shape
    torch.Size([2, 4, 32, 32])

    Args:
        x_shape: (channels, height, width) of ``x_t``; height and width in pixels or latent cells.
        condition: kind and size of the condition.
        params: fields of ``blocks.ExpertArchitecture``, such as ``patch_size``, ``size`` and ``mlp``.

    Raises:
        ValueError: sizes that do not fit each other. Choices are checked by the registry.
    """

    params = ExpertArchitecture

    def __init__(self, *, x_shape: tuple[int, int, int], condition: ConditionSpec, **params: Any) -> None:
        options = ExpertArchitecture(**params)
        super().__init__(
            x_shape=x_shape,
            condition=condition,
            options=options,
            out_features=x_shape[0] * options.patch_size**2,
        )
        self.prediction = options.prediction
        initialise(self)

    def forward(self, x_t: Samples, t: Times, condition: Condition | None) -> Samples:
        """The prediction, in the dtype of ``x_t``; ``condition=None`` is the learned null in every row."""
        conditioning = self.conditioning(t, condition)
        tokens = self.run(self.tokens(x_t), conditioning, self.table("rotation", x_t), condition)
        patches = self.final(tokens, conditioning)
        return embeddings.unpatchify(patches, x_t.shape, self.patch_size).to(x_t.dtype)


@ROUTERS.register("router-dit")
class RouterDiT(Trunk):
    """Logits of p(cluster | x_t, t, condition), as in Decentralized Diffusion Models (2501.05450).

    A learned class token without a position joins the patches. After the last block a linear layer reads it. That layer
    starts at zero, so at first all clusters are equally likely. Takes the parameters of ``DiT`` and:

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

    def forward(self, x_t: Samples, t: Times, condition: Condition | None) -> Float[Tensor, "b num_clusters"]:
        """Logits of the clusters; ``condition=None`` is the learned null in every row."""
        if condition is not None and self.training and self.text_dropout:
            condition = replace(condition, values=functional.dropout(condition.values, self.text_dropout))

        conditioning = self.conditioning(t, condition)
        patches = self.tokens(x_t)
        rotation = self.table("rotation", x_t)
        if self.training and self.dropout:
            kept = sample_kept(patches, self.dropout)
            patches = patches.gather(1, kept[:, :, None].expand(-1, -1, patches.shape[2]))
            if rotation is not None:
                rotation = rotation[0, kept]

        class_token = self.class_token.to(patches.dtype).expand(len(patches), 1, -1)
        tokens = torch.cat([class_token, patches], dim=1)
        if rotation is not None:
            unrotated = torch.zeros_like(rotation[:, :1])  # sines of the class token
            unrotated[:, :, 0] = 1  # its cosines
            rotation = torch.cat([unrotated, rotation], dim=1)

        tokens = self.run(tokens, conditioning, rotation, condition)
        # A copy, because FSDP2 warns about views, which it cannot track.
        return self.final(tokens[:, :1], conditioning)[:, 0].clone()


def sample_kept(tokens: Tokens, dropout: float) -> Int[Tensor, "b kept"]:
    """Indices of the tokens that each row keeps: a random ``1 - dropout`` of them, at least one, in random order."""
    b, n, _ = tokens.shape
    num_kept = max(1, round(n * (1 - dropout)))
    return torch.rand(b, n, device=tokens.device).argsort(dim=1)[:, :num_kept]
