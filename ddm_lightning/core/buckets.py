"""Aspect buckets: the shapes of images of a data set that keeps their proportions (NovelAI, 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ddm_lightning.core import checks

Size: TypeAlias = tuple[int, int]
"""Height and width, in pixels."""
_FORM = "{max_aspect: 2.0, step: 32} or a list of sizes, [[height, width], …]"
_MAX_SIDE = 8192


@dataclass(frozen=True)
class Bucket:
    """One shape of images."""

    height: checks.Size
    """In pixels."""
    width: checks.Size
    """In pixels."""
    x_shape: checks.Shape3
    """Channels, height and width of ``x_0``."""

    @property
    def name(self) -> str:
        """Height and width, ``320x192``; the folder of its shards."""
        return f"{self.height}x{self.width}"

    @property
    def size(self) -> Size:
        """Height and width."""
        return self.height, self.width


def bucket_sizes(rule: Any, size: int) -> list[Size]:
    """Return the sizes of a rule's buckets, wide before tall; none for no rule, or if all images are one square.

    Args:
        rule: ``prepare.images.buckets``: None; a list of [height, width]; or a mapping with ``max_aspect`` and
            ``step``: every height that ``step`` divides, with the width whose area is nearest to that of the square.
        size: height and width in pixels of the square of the same area.

    Raises:
        ValueError: no such rule, or impossible sizes.
    """
    if rule is None:
        return []
    if isinstance(rule, dict):
        sizes = _table(size, **_checked_rule(rule))
    else:
        sizes = _checked_list(rule)

    if sizes == [(size, size)]:
        return []

    return sorted(sizes, key=lambda one: one[0] / one[1])


def is_size(pair: Any, low: int = 1) -> bool:
    """Whether this is a height and a width of images, of at least ``low`` pixels."""
    is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
    return is_pair and all(checks.is_int(side, low) and side <= _MAX_SIDE for side in pair)


def sizes_of(given: Any) -> list[Size | None]:
    """The sizes that ``sample.size`` names; one None for null."""
    if given is None or is_size(given):
        given = [given]

    return [size and tuple(size) for size in given]


def _checked_rule(rule: dict[str, Any]) -> dict[str, Any]:
    if rule.keys() != {"max_aspect", "step"}:
        raise ValueError(f"must be {_FORM}")
    if not checks.is_int(rule["step"], 1):
        raise ValueError(f"step = {rule['step']}: must be a whole number of pixels, at least 1")
    if not checks.is_number(rule["max_aspect"]) or not 1 <= rule["max_aspect"] <= 100:
        raise ValueError(f"max_aspect = {rule['max_aspect']}: must be from 1 to 100")

    return rule


def _checked_list(rule: Any) -> list[Size]:
    if not isinstance(rule, list) or not all(is_size(pair, 8) for pair in rule):
        raise ValueError(f"must be {_FORM}, of 8 to {_MAX_SIDE} pixels a side")

    sizes = [(height, width) for height, width in rule]
    if not sizes or len({*sizes}) < len(sizes):
        raise ValueError("must hold at least one size, each once")

    return sizes


def _table(size: int, max_aspect: float, step: int) -> list[Size]:
    if size % step:
        raise ValueError(f"step = {step} must divide prepare.images.size = {size}")

    sizes = {(size, size)}
    # Wide ones, each with the tall one of its sides.
    for height in range(step, size, step):
        width = step * round(size**2 / (height * step))
        if width <= max_aspect * height and width <= _MAX_SIDE:
            sizes |= {(height, width), (width, height)}

    if len(sizes) == 1 and max_aspect > 1:
        raise ValueError(f"step = {step} leaves only the square; take a smaller step or a larger max_aspect")

    return list(sizes)


def nearest(sizes: Sequence[Size], height: int, width: int) -> int:
    """Return the number of the size whose aspect ratio is nearest, in log space; of equal ones, the largest."""

    def distance(number: int) -> tuple[float, int]:
        own_height, own_width = sizes[number]
        # Rounded, because two distances that are equal on paper differ in their last bits.
        return round(abs(math.log(own_width * height / (own_height * width))), 9), -own_height * own_width

    return min(range(len(sizes)), key=distance)
