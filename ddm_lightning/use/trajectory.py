"""Drawings of sampling trajectories: the experts' weights by step, and what the images look like on the way."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ddm_lightning.core.files import atomic_write
from ddm_lightning.core.grids import heat_map, labelled_grid, save_png, scale_of
from ddm_lightning.ensemble.trace import Key, Trace

Decode: TypeAlias = Callable[[Float[Tensor, "n c h w"]], UInt8[np.ndarray, "n h w 3"]]
"""``decode`` of an image encoder."""

# Images whose trajectory is drawn.
MAX_TRAJECTORIES = 4
_STRIP_COLUMNS = 10
_GIF_FRAMES = 30
_FRAME_MS = 100
_LAST_FRAME_MS = 1500
_MAX_TICKS = 8


def write_trajectory(
    path: Path,
    trace: Trace,
    names: Sequence[str],
    labels: Mapping[Key, str],
    decode: Decode,
    gif: bool = False,
    footer: str = "",
) -> dict[str, Path]:
    """Write the heat map, the strip and perhaps the GIF of ``trace`` beside the grid ``path``.

    Args:
        path: the grid's PNG file.
        trace: nothing is written of an empty one.
        names: the experts' names.
        labels: label of each image whose trajectory is drawn.
        decode: turns latents into images.
        gif: whether to write the GIF.
        footer: small text below strip and GIF, such as a credit.

    Returns:
        The files by what they show.
    """
    if not trace.weights:
        return {}
    heat, strip = (path.with_name(f"{path.stem}-{name}.png") for name in ("weights", "trajectory"))
    mean = torch.stack(list(trace.weights.values())).mean(0)
    num = len(trace.weights)
    title = "weights of the experts" + (f", mean of {num} images" if num > 1 else "")
    save_png(heat, weights_chart(trace.times, {title: mean}, names))

    def decoded(num: int) -> tuple[list[str], list[list[UInt8[np.ndarray, "h w 3"]]]]:
        """At most ``num`` times, and for each image a row of x_t and one of x_0."""
        picked = torch.linspace(0, len(trace.times) - 1, min(num, len(trace.times))).round().long()
        states = [of_key[key][picked] for key in labels for of_key in (trace.x_t, trace.x_0)]
        return [f"t = {t:.2f}" for t in trace.times[picked].tolist()], [list(decode(one)) for one in states]

    headings, images = decoded(_STRIP_COLUMNS)
    scale = scale_of(images[0][0])
    names_of_rows = [text for label in labels.values() for text in (f"{label}: x_t".lstrip(": "), "estimate of x_0")]
    save_png(strip, labelled_grid(list(zip(names_of_rows, images, strict=True)), scale, "", footer, headings))
    files = {"weights": heat, "trajectory": strip}
    if gif:
        headings, images = decoded(_GIF_FRAMES)
        frames = [
            labelled_grid([("x_t", columns[::2]), ("estimate of x_0", columns[1::2])], scale, heading, footer)
            for heading, columns in zip(headings, map(list, zip(*images, strict=True)), strict=True)
        ]
        durations = [*[_FRAME_MS] * (len(frames) - 1), _LAST_FRAME_MS]
        save = partial(
            frames[0].save, format="GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0
        )
        files["animation"] = path.with_suffix(".gif")
        atomic_write(files["animation"], save)
    return files


def weights_chart(
    times: Float[Tensor, " num_times"], panels: Mapping[str, Float[Tensor, "steps K"]], names: Sequence[str]
) -> Image.Image:
    """Draw the weights of the experts by step, one panel per title."""
    figure = Figure(figsize=(7, 0.5 + len(panels) * (0.4 + 0.25 * len(names))), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    steps = np.unique(np.linspace(0, len(times) - 2, min(_MAX_TICKS, len(times) - 1)).round().astype(int))
    for axis, (title, weights) in zip(axes, panels.items(), strict=True):
        heat_map(axis, weights.T.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(steps, [f"{times[step]:.2f}" for step in steps])
        axis.set_yticks(range(len(names)), names)
    axes[-1].set_xlabel("t at the start of each step (1 is noise)")
    figure.colorbar(axes[0].images[0], ax=list(axes), label="weight", aspect=12 * len(panels))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return Image.open(buffer)
