"""Data sets for tests and first steps: synthetic shapes and handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import ClassVar

import numpy as np
from jaxtyping import Bool

from ddm_lightning.core.checks import option
from ddm_lightning.core.registry import SOURCES, require
from ddm_lightning.prepare.records import Part, Record, block_of, block_parts

_COLOURS = {
    "red": (220, 50, 47),
    "blue": (38, 100, 210),
    "green": (60, 160, 60),
    "yellow": (235, 200, 40),
    "purple": (140, 70, 190),
}
_SHAPES = ("disc", "square", "cross", "ring")
# 5 and 4 are coprime, so stepping through both lists gives every pair once.
_KINDS = [(list(_COLOURS)[i % len(_COLOURS)], _SHAPES[i % len(_SHAPES)]) for i in range(len(_COLOURS) * len(_SHAPES))]


@SOURCES.register("blobs")
@dataclass
class Blobs:
    """Synthetic shapes at random positions and sizes on a light background; a kind is one colour and one shape.

    Args:
        num_samples: number of images.
        image_size: height and width in pixels.
        num_kinds: number of kinds; the label is the kind.
        seed: of the random numbers.
    """

    num_samples: int = 256
    image_size: int = 16
    num_kinds: int = option(4, low=1, high=len(_KINDS))
    seed: int = 0

    packages: ClassVar[tuple[str, ...]] = ()
    attribution: ClassVar = ""

    def __post_init__(self) -> None:
        self.num_classes = self.num_kinds
        self.class_names = [*map(" ".join, _KINDS[: self.num_kinds])]

    def parts(self) -> list[Part]:
        """List blocks of images."""
        return block_parts(self.num_samples, "1")

    def read(self, part: Part) -> Iterator[Record]:
        for index in block_of(part):
            # A random stream per image, so that image i is the same in a larger set.
            random = np.random.default_rng([self.seed, index])
            label = int(random.integers(self.num_classes))
            colour, shape = _KINDS[label]
            image = np.full((self.image_size, self.image_size, 3), random.integers(225, 256), dtype=np.uint8)
            image[self._mask(shape, random)] = _COLOURS[colour]
            yield Record(f"blob-{index:06}", image, f"{colour} {shape}", label)

    def _mask(self, shape: str, random: np.random.Generator) -> Bool[np.ndarray, "h w"]:
        radius = self.image_size * random.uniform(0.25, 0.4)
        centre = random.uniform(radius, self.image_size - radius, size=2)
        y, x = np.abs(np.mgrid[: self.image_size, : self.image_size] + 0.5 - centre[:, None, None])
        distance = np.hypot(y, x)
        masks = {
            "disc": distance <= radius,
            "square": np.maximum(y, x) <= 0.85 * radius,
            "cross": (np.minimum(y, x) <= 0.3 * radius) & (np.maximum(y, x) <= radius),
            "ring": (distance <= radius) & (distance >= 0.55 * radius),
        }
        return masks[shape]


_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_NUM_SAMPLES = 1797


@SOURCES.register("digits")
class Digits:
    """Handwritten digits, 8 x 8 pixels, grey as RGB; captions such as "digit zero", labels 0 to 9."""

    packages: tuple[str, ...] = ("scikit-learn",)
    attribution = ""
    num_classes = len(_NAMES)
    class_names: ClassVar = list(_NAMES)

    def __init__(self) -> None:
        require("source 'digits'", *self.packages)

    def parts(self) -> list[Part]:
        """List one part: all digits are read at once."""
        return [Part("all", version("scikit-learn"), _NUM_SAMPLES)]

    def read(self, part: Part) -> Iterator[Record]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        # Pixels are integers from 0 to 16.
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        for index, (grey, label) in enumerate(zip(pixels, digits.target, strict=True)):
            image = np.repeat(grey[:, :, None], 3, axis=2)
            yield Record(f"digit-{index:04}", image, f"digit {_NAMES[label]}", int(label))
