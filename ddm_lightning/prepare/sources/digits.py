"""scikit-learn's handwritten digits: 1,797 pictures of 8 × 8 grey pixels."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import numpy as np

from ddm_lightning.prepare.packages import require
from ddm_lightning.prepare.records import Part, Record
from ddm_lightning.prepare.registry import SOURCES

_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_NUM_SAMPLES = 1797


@SOURCES.register("digits")
class Digits:
    """Digits as RGB pictures of three equal channels, captions such as "digit zero", the digit as label."""

    packages: tuple[str, ...] = ("scikit-learn",)
    attribution = ""
    num_classes, class_names = len(_NAMES), list(_NAMES)

    def __init__(self) -> None:
        require("source 'digits'", *self.packages)

    def parts(self) -> list[Part]:
        """One: all of them are read at once."""
        return [Part("all", version("scikit-learn"), _NUM_SAMPLES)]

    def read(self, part: Part) -> Iterator[Record]:
        """All digits."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        # The pixels are counts from 0 to 16.
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        for index, (picture, label) in enumerate(zip(pixels, digits.target, strict=True)):
            image = np.repeat(picture[:, :, None], 3, axis=2)
            yield Record(f"digit-{index:04}", image, f"digit {_NAMES[label]}", int(label))
