"""Options of a diffusion transformer: a named size, and the recipe of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CHOICES = {"mlp": ("gelu", "swiglu"), "norm": ("layer", "rms"), "modulation": ("zero", "single")}


class Size(NamedTuple):
    """Depth, width and heads of a transformer."""

    depth: int
    width: int
    num_heads: int


SIZES = {"S": Size(12, 384, 6), "B": Size(12, 768, 12), "L": Size(24, 1024, 16), "XL": Size(28, 1152, 16)}
"""Table 1 of Peebles and Xie, 2212.09748."""


def choose_size(size: str | None, *, width: int | None, depth: int | None, num_heads: int | None) -> Size:
    """The size given by its name or by its three numbers.

    Raises:
        ValueError: unknown name, both a name and numbers, or neither a name nor all numbers.
    """
    numbers = {"width": width, "depth": depth, "num_heads": num_heads}
    given = [name for name, number in numbers.items() if number is not None]
    if size is not None:
        if size not in SIZES:
            raise ValueError(f"size = {size!r} is none of {', '.join(SIZES)}")
        if given:
            raise ValueError(f"size = {size!r} sets width, depth and num_heads: remove it or {', '.join(given)}")
        return SIZES[size]
    if width is None or depth is None or num_heads is None:
        absent = ", ".join(name for name in numbers if name not in given)
        raise ValueError(f"needs size ({', '.join(SIZES)}), or width, depth and num_heads; {absent} missing")
    return Size(depth=depth, width=width, num_heads=num_heads)


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
    mlp: str = "gelu"
    """``gelu``, or ``swiglu`` (``blocks.SwiGLU``, with about as many parameters)."""
    norm: str = "layer"
    """``layer`` or ``rms``: the norm before shift and scale, without parameters."""
    modulation: str = "zero"
    """``zero``: each block has its own projection of time and condition (adaLN-Zero, section 3.2). ``single``: all
    blocks share one projection, and each adds its own table (adaLN-single, Chen et al., 2310.00426, section 2.3)."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            word = getattr(self, name)
            if word not in choices:
                raise ValueError(f"{name} = {word!r} is none of {', '.join(choices)}")
