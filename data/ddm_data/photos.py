"""Patches of the photographs in scikit-image and scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image

from ddm_data.earthtiles import height_and_width
from ddm_lightning.core.registry import file_of, require
from ddm_lightning.prepare.records import Part, Record

# Caption by package and file.
_PHOTOS = {
    ("scikit-image", "skimage/data/astronaut.png"): "astronaut in front of a flag",
    ("scikit-image", "skimage/data/brick.png"): "brick wall",
    ("scikit-image", "skimage/data/chelsea.png"): "tabby cat",
    ("scikit-image", "skimage/data/coffee.png"): "cup of coffee on a wooden table",
    ("scikit-image", "skimage/data/grass.png"): "grass",
    ("scikit-image", "skimage/data/gravel.png"): "gravel",
    ("scikit-image", "skimage/data/hubble_deep_field.jpg"): "galaxies and stars",
    ("scikit-image", "skimage/data/ihc.png"): "stained tissue under a microscope",
    ("scikit-image", "skimage/data/retina.jpg"): "retina of an eye",
    ("scikit-image", "skimage/data/rocket.jpg"): "rocket at a launch site",
    ("scikit-learn", "sklearn/datasets/images/china.jpg"): "Chinese palace",
    ("scikit-learn", "sklearn/datasets/images/flower.jpg"): "dahlia flower",
}


class Photos:
    """Patches of twelve photographs; the label is the photograph, the caption says what it shows.

    Patches overlap. They are held out by blocks, and no patch crosses a block's border: held-out patches share no
    pixel with the others. Patches of almost one colour are skipped.

    Args:
        size: height and width of a patch in pixels, or [height, width].
        stride: pixels between neighbouring patches.
        block: height and width of a block in pixels.
        max_side: larger photographs are scaled down to this height or width, so that none fills the set.
        min_std: smallest standard deviation of a patch's values, from 0 to 255.
    """

    packages: tuple[str, ...] = ("scikit-image", "scikit-learn", "pillow")
    attribution = (
        "Photographs: from scikit-image (NASA, SpaceX, CC0Textures, S. van der Walt, R. Michetti and others; public "
        "domain or CC0) and scikit-learn (china.jpg by danielbuechele, flower.jpg by vultilion; CC BY 2.0)"
    )
    num_classes = len(_PHOTOS)
    class_names: ClassVar = list(_PHOTOS.values())

    def __init__(
        self,
        size: int | Sequence[int] = 48,
        stride: int = 16,
        block: int = 128,
        max_side: int = 768,
        min_std: float = 8.0,
    ) -> None:
        require("source 'photos'", "scikit-image", "scikit-learn", extra="mix")
        self.height, self.width = height_and_width(size)
        if min(self.height, self.width) < 8 or max(self.height, self.width) > block or stride < 1:
            raise ValueError("size must be from 8 to block, and stride at least 1")

        self.stride = stride
        self.block = block
        self.max_side = max_side
        self.min_std = min_std

    def parts(self) -> list[Part]:
        """List one part per photograph."""
        parts = []
        for label, (package, file) in enumerate(_PHOTOS):
            where = {"package": package, "file": file, "label": label}
            part = Part(Path(file).name, version(package), None, where)
            num_samples = sum(1 for _ in self.read(part))
            parts.append(replace(part, num_samples=num_samples))

        return parts

    def read(self, part: Part) -> Iterator[Record]:
        """Yield the patches of the photograph, block by block."""
        label = part.where["label"]
        with Image.open(file_of(part.where["package"], part.where["file"])) as image:
            whole = image.convert("RGB")

        whole.thumbnail((self.max_side, self.max_side), Image.Resampling.LANCZOS)
        photo = np.asarray(whole)
        height, width, _ = photo.shape
        for y, x in product(self._starts(height, self.height), self._starts(width, self.width)):
            patch = photo[y : y + self.height, x : x + self.width]
            if patch.std() >= self.min_std:
                key = f"{part.name}-{y:04}-{x:04}"
                block = f"{part.name}: {y // self.block},{x // self.block}"
                yield Record(key, patch, self.class_names[label], label, block)

    def _starts(self, length: int, side: int) -> Iterator[int]:
        """Yield where patches begin along a side of the photograph; none crosses a block's border."""
        for start in range(0, length, self.block):
            end = min(start + self.block, length)
            yield from range(start, end - side + 1, self.stride)
