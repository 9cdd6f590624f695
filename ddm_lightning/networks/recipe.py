"""What an experiment chooses of a diffusion transformer: a size by name, and the recipe of its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CHOICES = {"mlp": ("gelu", "swiglu"), "norm": ("layer", "rms"), "modulation": ("zero", "single")}


class Size(NamedTuple):
    """How wide and how deep a transformer is."""

    depth: int
    width: int
    num_heads: int


SIZES = {"S": Size(12, 384, 6), "B": Size(12, 768, 12), "L": Size(24, 1024, 16), "XL": Size(28, 1152, 16)}
"""Table 1 of Peebles and Xie, 2212.09748."""


def choose_size(size: str | None, *, width: int | None, depth: int | None, num_heads: int | None) -> Size:
    """The size of a name, or of its three numbers.

    Raises:
        ValueError: unknown name, a name beside numbers, or neither a name nor all numbers.
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
        raise ValueError(f"it needs size ({', '.join(SIZES)}), or width, depth and num_heads; there is no {absent}")
    return Size(depth=depth, width=width, num_heads=num_heads)


@dataclass(frozen=True)
class Recipe:
    """How the blocks of a ``Trunk`` are made; the defaults are those of DiT (Peebles and Xie, 2212.09748).

    Raises:
        ValueError: a word that is no choice.
    """

    mlp_ratio: float = 4.0
    """Hidden features of a block's MLP over its width."""
    qk_norm: bool = False
    """An RMSNorm of queries and keys a head."""
    rope: bool = False
    """Rotary positions on the queries and keys of patches, in place of those that are added to the patches."""
    mlp: str = "gelu"
    """``gelu`` or ``swiglu`` (``blocks.SwiGLU``, of about as many parameters)."""
    norm: str = "layer"
    """``layer`` or ``rms``: what precedes shift and scale, without parameters of its own."""
    modulation: str = "zero"
    """``zero``: each block projects time and condition itself (adaLN-Zero, section 3.2); ``single``: one projection
    serves all blocks, and each adds a table of its own (adaLN-single, Chen et al., 2310.00426, section 2.3)."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            word = getattr(self, name)
            if word not in choices:
                raise ValueError(f"{name} = {word!r} is none of {', '.join(choices)}")
