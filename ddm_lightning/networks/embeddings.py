"""Inputs of a diffusion transformer: patches, their positions, the time and the condition."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.flow.path import Times

_MAX_PERIOD = 10_000.0


def patchify(x: Float[Tensor, "b c h w"], patch_size: int) -> Float[Tensor, "b n p"]:
    """Cut ``x`` into square patches, row by row; each patch is flattened as (channel, row, column).

    A linear layer on the patches equals a strided convolution on ``x``, and is faster on a CPU.
    """
    b, c, h, w = x.shape
    rows, columns = h // patch_size, w // patch_size
    cut = x.reshape(b, c, rows, patch_size, columns, patch_size).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(b, rows * columns, c * patch_size**2)


def unpatchify(
    patches: Float[Tensor, "b n p"], x_shape: tuple[int, int, int], patch_size: int
) -> Float[Tensor, "b c h w"]:
    """The inverse of ``patchify`` for ``x`` of shape ``x_shape`` = (c, h, w)."""
    c, h, w = x_shape
    grid = patches.unflatten(1, (h // patch_size, w // patch_size)).unflatten(3, (c, patch_size, patch_size))
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(-1, c, h, w)


def sincos_positions(width: int, rows: int, columns: int) -> Float[Tensor, "n width"]:
    """Fixed 2-D positions, row by row: half of ``width`` encodes the column, half the row; each sines, then cosines.

    The layout of DiT (Peebles and Xie, 2212.09748) and MAE (He et al., 2111.06377).

    Raises:
        ValueError: ``width`` is not divisible by 4.
    """
    if width % 4:
        raise ValueError(f"width = {width} must be divisible by 4, for sines and cosines of two coordinates")
    angles = _angles(width // 4, rows, columns)
    return torch.cat([wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], dim=1).float()


def axial_rotation(head_size: int, rows: int, columns: int) -> Float[Tensor, "1 n 2 half"]:
    """Cosines and sines of the angles of ``attention.rotate``, for each patch, row by row.

    Rotary positions (RoFormer: Su et al., 2104.09864) on two axes (Heo et al., 2403.13298, section 3.2): the first half
    of a head's feature pairs encodes the column, the second the row, at the frequencies of ``sincos_positions``.

    Raises:
        ValueError: ``head_size`` is not divisible by 4.
    """
    if head_size % 4:
        raise ValueError(f"rope needs width / num_heads = {head_size} to be divisible by 4, for pairs on two axes")
    angles = torch.cat(_angles(head_size // 4, rows, columns), dim=1)
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()[None]


def _angles(num_frequencies: int, rows: int, columns: int) -> list[Tensor]:
    """Angles of the columns, then of the rows; each [rows * columns, num_frequencies] in float64."""
    frequencies = _MAX_PERIOD ** (-torch.arange(num_frequencies, dtype=torch.float64) / num_frequencies)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return [coordinate.reshape(-1, 1) * frequencies for coordinate in (column, row)]


def sinusoidal(t: Float[Tensor, " b"], size: int) -> Float[Tensor, "b size"]:
    """Cosines, then sines of 1000·t at ``size`` / 2 geometric frequencies (Vaswani et al., 1706.03762, section 3.5).

    Raises:
        ValueError: ``t`` is narrower than 32 bits.
    """
    if t.dtype not in (torch.float32, torch.float64):
        # bfloat16 has 8 significant bits: t = 0.937 would become 0.9375, t = 0.999 would become 1.
        raise ValueError(f"t is {t.dtype}; times must reach the network in float32")
    half = size // 2
    frequencies = torch.exp(-math.log(_MAX_PERIOD) / half * torch.arange(half, dtype=t.dtype, device=t.device))
    angles = (1000 * t)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


class TwoLayers(nn.Module):
    """MLP of two linear layers with a SiLU in between, and normal(0.02) weights."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(size, width)
        self.out = nn.Linear(width, width)

    def initialise(self) -> None:
        """Initialise the weights from a normal distribution with std 0.02."""
        nn.init.normal_(self.hidden.weight, std=0.02)
        nn.init.normal_(self.out.weight, std=0.02)

    def project(self, vectors: Float[Tensor, "b size"]) -> Float[Tensor, "b width"]:
        """One vector per row."""
        return self.out(functional.silu(self.hidden(vectors)))


class TimestepEmbedding(TwoLayers):
    """Embedding of the time: ``sinusoidal`` in float32, then a two-layer MLP (Peebles and Xie, 2212.09748)."""

    def __init__(self, width: int, num_frequencies: int = 256) -> None:
        super().__init__(num_frequencies, width)
        self.num_frequencies = num_frequencies

    def forward(self, t: Float[Tensor, " b"]) -> Float[Tensor, "b width"]:
        """One vector per row; raises ``ValueError`` for a ``t`` narrower than 32 bits."""
        return self.project(sinusoidal(t, self.num_frequencies).to(self.hidden.weight.dtype))


class _NullableEmbedding(nn.Module):
    """A layer ``embed``, and a learned null for dropped conditions."""

    def __init__(self, embed: nn.Linear | nn.Embedding, width: int) -> None:
        super().__init__()
        self.embed = embed
        self.null = nn.Parameter(torch.zeros(width))

    def initialise(self) -> None:
        """Initialise weights and null from a normal distribution with std 0.02."""
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.null, std=0.02)


class ConditionEmbedding(_NullableEmbedding):
    """Embedding of a pooled condition: a linear layer for text, a table for classes, a learned null if dropped.

    Text vectors need no normalisation: their entries have unit variance (unit norm times the root of their size).
    Text tokens are averaged; ``TokenEmbedding`` keeps them apart. Kind ``none`` has nothing to embed.
    """

    def __init__(self, spec: ConditionSpec, width: int) -> None:
        layer = nn.Embedding if spec.kind == "class" else nn.Linear
        super().__init__(layer(spec.size, width), width)

    def forward(self, condition: Condition | None, num_rows: int) -> Float[Tensor, "b width"]:
        """One vector for each of ``num_rows`` rows; ``None`` gives the null in all."""
        null = self.null.expand(num_rows, -1)
        if condition is None:
            return null
        values = condition.values
        if isinstance(self.embed, nn.Linear):
            # Text vectors may be stored in float16.
            values = values.to(self.embed.weight.dtype)
            values = values.mean(1) if values.ndim == 3 else values
        return torch.where(condition.keep[:, None], self.embed(values), null)


class TokenEmbedding(_NullableEmbedding):
    """Embedding of text tokens, for cross-attention: a linear layer; a learned null repeated if the text is dropped.

    Needs a ``spec`` of kind ``tokens``.
    """

    def __init__(self, spec: ConditionSpec, width: int) -> None:
        super().__init__(nn.Linear(spec.size, width), width)
        self.shape = spec.row_shape

    def forward(self, condition: Condition | None, num_rows: int) -> Float[Tensor, "b m width"]:
        """One sequence for each of ``num_rows`` rows; ``None`` gives the null in all.

        Raises:
            ValueError: another number or size of tokens than in ``spec``.
        """
        if condition is None:
            return self.null.expand(num_rows, self.shape[0], -1)
        values = condition.values
        if values.shape[1:] != self.shape:
            raise ValueError(f"the network takes text tokens of shape {self.shape}, not {tuple(values.shape[1:])}")
        # Text tokens may be stored in float16.
        embedded = self.embed(values.to(self.embed.weight.dtype))
        return torch.where(condition.keep[:, None, None], embedded, self.null)


class Conditioned(nn.Module):
    """Base of networks that are modulated by the time and, if it is one vector, by the condition."""

    time_embedding: TimestepEmbedding
    condition_embedding: ConditionEmbedding | None
    token_embedding: TokenEmbedding | None

    def add_condition(self, spec: ConditionSpec, width: int) -> None:
        """Make the embedding of a text vector or class, or that of text tokens."""
        is_vector = spec.kind in ("text", "class")
        self.condition_embedding = ConditionEmbedding(spec, width) if is_vector else None
        self.token_embedding = TokenEmbedding(spec, width) if spec.kind == "tokens" else None

    def conditioning(self, t: Times, condition: Condition | None) -> Float[Tensor, "b d"]:
        """The vector that modulates all blocks, after the SiLU that they share.

        Raises:
            ValueError: a condition for a network without one.
        """
        summed: Tensor = self.time_embedding(t)
        if self.condition_embedding is not None:
            summed = summed + self.condition_embedding(condition, len(t))
        elif condition is not None and self.token_embedding is None:
            raise ValueError("the network was built without a condition; pass None")
        return functional.silu(summed)
