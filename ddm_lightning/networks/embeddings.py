"""Inputs of a diffusion transformer: patches, their positions, the time and the condition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import Times, expand_rows
from ddm_lightning.flow.spec import ConditionSpec

_MAX_PERIOD = 10_000.0
_TIME_FEATURES = 256


def patchify(x: Float[Tensor, "b c h w"], patch_size: int) -> Float[Tensor, "b n p"]:
    """Cut ``x`` into square patches, row by row; each patch is flattened as (channel, row, column).

    A linear layer on the patches equals a strided convolution on ``x``, and is faster on a CPU.
    """
    return functional.pixel_unshuffle(x, patch_size).flatten(2).transpose(1, 2).contiguous()


def unpatchify(patches: Float[Tensor, "b n p"], x_shape: Sequence[int], patch_size: int) -> Float[Tensor, "b c h w"]:
    """The inverse of ``patchify`` for ``x`` of shape ``x_shape`` = (c, h, w) or (b, c, h, w)."""
    rows = x_shape[-2] // patch_size
    return functional.pixel_shuffle(patches.transpose(1, 2).unflatten(2, (rows, -1)), patch_size)


def sincos_positions(
    width: int, rows: int, columns: int, reference: tuple[int, int] | None = None
) -> Float[Tensor, "n width"]:
    """Fixed 2-D positions, row by row: half of ``width`` encodes the column, half the row; each sines, then cosines.

    The layout of DiT (Peebles and Xie, 2212.09748) and MAE (He et al., 2111.06377). ``coordinates`` explains
    ``reference``.

    Raises:
        ValueError: ``width`` is not divisible by 4.
    """
    if width % 4:
        raise ValueError(f"width = {width} must be divisible by 4, for sines and cosines of two coordinates")

    if torch.get_default_device().type == "meta":
        # To plan the sines, torch would import its compiler, which takes a second.
        return torch.empty(rows * columns, width, dtype=torch.float32)

    of_columns, of_rows = _angles(width // 4, rows, columns, reference)
    waves = [of_columns.sin(), of_columns.cos(), of_rows.sin(), of_rows.cos()]
    return torch.cat(waves, dim=1).float()


def axial_rotation(
    head_size: int, rows: int, columns: int, reference: tuple[int, int] | None = None
) -> Float[Tensor, "1 n 2 half"]:
    """Cosines and sines of the angles of ``attention.rotate``, for each patch, row by row.

    Rotary positions (RoFormer: Su et al., 2104.09864) on two axes (Heo et al., 2403.13298, section 3.2): the first half
    of a head's feature pairs encodes the column, the second the row, at the frequencies of ``sincos_positions``.
    ``coordinates`` explains ``reference``.

    Raises:
        ValueError: ``head_size`` is not divisible by 4.
    """
    if head_size % 4:
        raise ValueError(f"rope needs width / num_heads = {head_size} to be divisible by 4, for pairs on two axes")

    if torch.get_default_device().type == "meta":
        return torch.empty(1, rows * columns, 2, head_size // 2, dtype=torch.float32)

    angles = torch.cat(_angles(head_size // 4, rows, columns, reference), dim=1)
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()[None]


def coordinates(rows: int, columns: int, reference: tuple[int, int] | None = None) -> list[Float[Tensor, " n"]]:
    """Column, then row, of each patch of a grid, row by row, in float64.

    A grid has the middle and the area of its ``reference``, whose own coordinates are 0, 1, 2 and so on. So all grids
    of an experiment cover about the same numbers, and patches stay square.

    Args:
        rows: of the grid.
        columns: of the grid.
        reference: rows and columns of the reference; None for the grid itself.
    """
    reference = reference or (rows, columns)
    scale = math.sqrt(math.prod(reference) / (rows * columns))
    axes = []
    for num, wanted in zip((rows, columns), reference, strict=True):
        axes.append((torch.arange(num, dtype=torch.float64) + 0.5 - num / 2) * scale + wanted / 2 - 0.5)

    row, column = torch.meshgrid(axes, indexing="ij")
    return [column.flatten(), row.flatten()]


def _angles(num_frequencies: int, rows: int, columns: int, reference: tuple[int, int] | None) -> list[Tensor]:
    """Angles of the columns, then of the rows; each [rows * columns, num_frequencies] in float64."""
    frequencies = _MAX_PERIOD ** (-torch.arange(num_frequencies, dtype=torch.float64) / num_frequencies)
    return [coordinate[:, None] * frequencies for coordinate in coordinates(rows, columns, reference)]


def sinusoidal(t: Float[Tensor, " b"], size: int) -> Float[Tensor, "b size"]:
    """Cosines, then sines of 1000·t at ``size`` / 2 geometric frequencies (Vaswani et al., 1706.03762, section 3.5).

    ``t`` must not be narrower than float32: in bfloat16, 0.937 would become 0.9375, and 0.999 would become 1.
    """
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

    def forward(self, vectors: Float[Tensor, "b size"]) -> Float[Tensor, "b width"]:
        """One vector per row."""
        return self.out(functional.silu(self.hidden(vectors)))


class TimestepEmbedding(TwoLayers):
    """Embedding of the time: ``sinusoidal`` in float32, then a two-layer MLP (Peebles and Xie, 2212.09748)."""

    def __init__(self, width: int) -> None:
        super().__init__(_TIME_FEATURES, width)

    def forward(self, t: Float[Tensor, " b"]) -> Float[Tensor, "b width"]:
        """One vector per row."""
        return super().forward(sinusoidal(t, self.hidden.in_features).to(self.hidden.weight.dtype))


class UnitNorm(nn.Module):
    """Scale vectors whose entries have unit variance to unit norm."""

    def forward(self, vectors: Float[Tensor, "b size"]) -> Float[Tensor, "b size"]:
        """The vectors over the root of their size."""
        return vectors * vectors.shape[-1] ** -0.5


class ConditionEmbedding(nn.Module):
    """Embedding of a condition: a linear layer for text, a table for classes, a learned null if dropped.

    Text vectors, whose entries have unit variance, are scaled to unit norm: else a step of Adam, which changes each
    weight by the learning rate, moves the embedding of a long vector by hundreds of learning rates, and a network that
    trains at a high one loses its condition (docs/log.md, 2026-11-27). Kind ``none`` has nothing to embed.

    Args:
        spec: kind and size of the condition.
        width: entries of an embedded vector.
        keep_tokens: embed each text token, for cross-attention, with the null repeated; otherwise their mean.
    """

    def __init__(self, spec: ConditionSpec, width: int, keep_tokens: bool = False) -> None:
        super().__init__()
        self.embed: nn.Module
        if spec.kind == "class":
            self.embed = nn.Embedding(spec.size, width)
        elif keep_tokens:
            self.embed = nn.Linear(spec.size, width)
        else:
            self.embed = nn.Sequential(UnitNorm(), nn.Linear(spec.size, width))

        self.null = nn.Parameter(torch.zeros(width))
        self.tokens = (spec.length,) if keep_tokens else ()

    def initialise(self) -> None:
        """Initialise null and weights, as they act on unscaled vectors, from a normal distribution with std 0.02."""
        weight = next(self.embed.parameters())
        std = 0.02
        if isinstance(self.embed, nn.Sequential):
            std *= math.sqrt(weight.shape[1])

        nn.init.normal_(weight, std=std)
        nn.init.normal_(self.null, std=0.02)

    def forward(self, condition: Condition | None, num_rows: int) -> Float[Tensor, "b *m width"]:
        """One vector, or one per token, for each of ``num_rows`` rows; ``None`` gives the null in all."""
        null = self.null.expand(num_rows, *self.tokens, -1)
        if condition is None:
            return null

        values = condition.values
        if not isinstance(self.embed, nn.Embedding):
            # Text may be stored in float16.
            values = values.to(self.null.dtype)
            if values.ndim == 3 and not self.tokens:  # in plug-ins
                values = values.mean(1)

        return torch.where(expand_rows(condition.keep, null), self.embed(values), null)


class Conditioned(nn.Module):
    """Base of networks that are modulated by the time and by a condition of one vector, such as a class."""

    time_embedding: TimestepEmbedding

    def add_condition(self, spec: ConditionSpec, width: int) -> None:
        """Make the embeddings of a text vector or class, and of text tokens."""
        is_vector = spec.pooled.kind in ("text", "class")
        self.condition_embedding = None
        if is_vector:
            self.condition_embedding = ConditionEmbedding(spec.pooled, width)

        self.token_embedding = None
        if spec.length:
            self.token_embedding = ConditionEmbedding(spec, width, keep_tokens=True)

    def conditioning(self, t: Times, condition: Condition | None) -> Float[Tensor, "b d"]:
        """The vector that modulates all blocks, after the SiLU that they share; other conditions have no effect."""
        summed: Tensor = self.time_embedding(t)
        if self.condition_embedding is not None:
            summed = summed + self.condition_embedding(condition and condition.pooled, len(t))

        return functional.silu(summed)
