"""Draw the grid of docs/sampling.md: prompts in their own shapes, by the ensemble of experiments/shapes_4x.yaml.

python docs/images/shapes.py docs/images/shapes.png
"""

from __future__ import annotations

import sys

import numpy as np

from ddm_lightning import Run
from ddm_lightning.core.grids import labelled_grid

PROMPTS = {
    (20, 40): ("emoji: flag: Japan", "satellite: hot desert", "satellite: coast, tundra"),
    (24, 32): ("relief: boreal forest", "photo: galaxies and stars"),
    (28, 28): ("emoji: grinning face", "emoji: red apple"),
    (32, 24): ("emoji: pregnant woman",),
    (40, 20): ("emoji: man standing", "portrait: tabby cat"),
}
"""Prompts by height and width."""


def main(out: str, *overrides: str) -> None:
    """Draw eight images of each prompt."""
    ensemble = Run("experiments/shapes_4x.yaml", overrides).ensemble()
    rows = []
    for (height, width), prompts in PROMPTS.items():
        images = ensemble(prompts, num_images_per_prompt=8, seed=0, height=height, width=width).images
        for number, prompt in enumerate(prompts):
            own = images[8 * number : 8 * number + 8]
            rows.append((f"{prompt} ({height} x {width})", [np.asarray(image) for image in own]))

    grid = labelled_grid(rows, 2, footer=ensemble.credit_line)
    grid.quantize(256).save(out, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
