"""Options of a diffusion transformer: its size, and the recipe of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from ddm_lightning.core.checks import option


class Size(NamedTuple):
    """Depth, width and heads of a transformer."""

    depth: int
    width: int
    num_heads: int


SIZES = {"S": Size(12, 384, 6), "B": Size(12, 768, 12), "L": Size(24, 1024, 16), "XL": Size(28, 1152, 16)}
"""Table 1 of Peebles and Xie, 2212.09748."""


@dataclass(frozen=True)
class Recipe:
    """Options of the blocks of a ``Trunk``; the defaults are those of DiT (Peebles and Xie, 2212.09748).

    Raises:
        ValueError: an unknown choice.
    """

    mlp_ratio: float = 4.0
    """Hidden features of a block's MLP, as a multiple of its width."""
    qk_norm: bool = False
    """RMSNorm of each head's queries and keys."""
    rope: bool = False
    """Rotary positions on queries and keys, instead of positions added to the patches."""
    mlp: str = option("gelu", choices=("gelu", "swiglu"))
    """``gelu``, or ``swiglu`` (``blocks.SwiGLU``, with about as many parameters)."""
    norm: str = option("layer", choices=("layer", "rms"))
    """``layer`` or ``rms``: the norm before shift and scale, without parameters."""
    modulation: str = option("zero", choices=("zero", "single"))
    """``zero``: each block has its own projection of time and condition (adaLN-Zero, section 3.2). ``single``: all
    blocks share one projection, and each adds its own table (adaLN-single, Chen et al., 2310.00426, section 2.3)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            choices, word = field.metadata.get("choices"), getattr(self, field.name)
            if choices and word not in choices:
                raise ValueError(f"{field.name} = {word!r} is none of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class Architecture(Recipe):
    """Patches, size and recipe of a ``Trunk``: parameters of ``DiT`` and ``RouterDiT``."""

    patch_size: int
    """Edge of a square patch, in cells of ``x_t``."""
    size: str | None = None
    """``S``, ``B``, ``L`` or ``XL`` (``SIZES``), instead of the next three."""
    width: int | None = None
    """Features of a token."""
    depth: int | None = None
    """Number of blocks."""
    num_heads: int | None = None
    """Attention heads of a block."""

    def sizes(self) -> Size:
        """The size given by its name or by its three numbers.

        Raises:
            ValueError: unknown name, both a name and numbers, or neither a name nor all numbers.
        """
        given = [number for number in (self.depth, self.width, self.num_heads) if number is not None]
        if self.size not in (None, *SIZES) or len(given) != (3 if self.size is None else 0):
            raise ValueError(
                f"needs either size ({', '.join(SIZES)}) or all of width, depth and num_heads; given are size = "
                f"{self.size}, width = {self.width}, depth = {self.depth}, num_heads = {self.num_heads}"
            )
        return Size(*given) if self.size is None else SIZES[self.size]


@dataclass(frozen=True, kw_only=True)
class ExpertArchitecture(Architecture):
    """Parameters of ``DiT``."""

    prediction: str = option("velocity", choices=("velocity", "epsilon", "x_0"))
    """Output of the network: ``velocity``, ``epsilon`` (the noise) or ``x_0`` (the data)."""
