"""Files that ``sample`` writes: a labelled grid, single images, and drawings of their trajectories."""

from __future__ import annotations

import io
import itertools
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from ddm_lightning import __version__
from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.buckets import sizes_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_files, sha256_file
from ddm_lightning.core.formatting import Bars, format_bytes
from ddm_lightning.core.grids import labelled_grid, save_png, scale_of
from ddm_lightning.ensemble.routing import Key, Trace
from ddm_lightning.use.call import STRENGTH
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.recipe import Recipe, open_image
from ddm_lightning.use.rows import MAX_ROWS

# Images whose trajectory is drawn.
MAX_TRAJECTORIES = 4
_STRIP_COLUMNS = 10
_GIF_FRAMES = 30
_MAX_TICKS = 8
# Columns of the largest grid; images beyond it are written as single images only.
MAX_COLUMNS = 32
# What the name of a file leaves out of a prompt: all but letters with their marks, digits and symbols such as emoji.
_NO_WORD = re.compile(r"(?:[^\w\xa1-\U0010ffff]|[\s\u200e\u200f\u202a-\u202e\u2066-\u2069])+")


def write_samples(
    ensemble: DecentralizedEnsemble,
    path: Path,
    prompts: Sequence[str] = (),
    *,
    classes: Sequence[str] = (),
    singles: Path | None = None,
    gif: bool = False,
    only: int | None = None,
    negative_prompt: str = "",
    image: Path | None = None,
    strength: float = STRENGTH,
) -> dict[str, Path]:
    """Generate ``sample.num_per_prompt`` images per prompt or class, and write them as a grid to the PNG ``path``.

    With several sizes there are rows of each prompt in the first, then in the second. The grid has at most ``MAX_ROWS``
    by ``MAX_COLUMNS`` images. With ``singles``, a folder beside the grid, also write each single image and the files
    of ``write_trajectory``. Files appear when all are finished.

    Args:
        ensemble: the ensemble, with the settings of this call.
        path: the grid's file.
        prompts, classes: rows of the grid; see ``DecentralizedEnsemble.rows``.
        singles: folder for single images; None writes none.
        gif: whether to write the trajectory as a GIF.
        only: number of the image of each row, if ``sample.num_per_prompt`` is 1; by default the first.
        negative_prompt: takes the place of the null condition; empty for none.
        image: file of an image to start from; None starts from noise.
        strength: share of the steps that are run from the noisy image.

    Returns:
        The files of the trajectory.

    Raises:
        UserError: a damaged artifact, an empty prompt, no such class, a file that is no image, or too many images for
            the disk; or as ``DecentralizedEnsemble.rows``.
    """
    about = ensemble.about
    settings = about.sample
    if singles is None:
        prompts = prompts[:MAX_ROWS]
        classes = classes[:MAX_ROWS]

    sizes = sizes_of(settings.size)
    start = image and open_image(image)
    parts = [ensemble.rows(prompts, classes, [negative_prompt], start, size) for size in sizes]
    lines = [(rows, row) for rows in parts for row in range(len(rows.labels))]
    num = settings.num_per_prompt
    if num > 1:
        only = None
    if only is not None:
        for rows in parts:
            rows.repeats = [only] * len(rows.labels)

    recipe = Recipe(
        version=__version__,
        name=about.name,
        ensemble=ensemble.manifest.sha256,
        seed=about.seed,
        sample=replace(settings, prompts=[*prompts]),
        classes=[],
        index=only,
        negative_prompt=negative_prompt,
        image=None if image is None else sha256_file(image),
        strength=strength,
    )
    condition = parts[0].condition
    if ensemble.meta.condition.kind == "class" and condition:
        recipe = replace(recipe, classes=condition.values.tolist())
    if singles is None:
        num = min(num, MAX_COLUMNS)

    num_columns = min(num, MAX_COLUMNS)
    in_grid: dict[Key, str] = {}
    for index in range(num_columns):
        for rows, row in lines[:MAX_ROWS]:
            in_grid[rows.key(row * num + index, num)] = rows.labels[row]

    shown: list[tuple[str, list[np.ndarray]]] = [(rows.labels[row], []) for rows, row in lines[:MAX_ROWS]]
    labels = dict(itertools.islice(in_grid.items(), MAX_TRAJECTORIES))
    trace = None
    if singles is not None:
        trace = Trace(in_grid, labels)

    files: dict[str, Path] = {}
    with atomic_files(path.parent) as folder, Bars() as progress:
        total = num * len(lines)
        least = 4096 * total  # a file takes at least a block
        free = shutil.disk_usage(folder).free
        if singles is not None and least > free:
            raise UserError(
                f"{path.parent}: {total:,} images take at least {format_bytes(least)}, and {format_bytes(free)} is "
                "free; lower --num, or give another disk with --out"
            )

        task = progress.add_task("images", total=total)
        number = -1
        for rows, size in zip(parts, sizes, strict=True):
            before = number + 1
            advance = progress.from_here(task)
            for row, index, made in ensemble.images(rows, num, advance, trace=trace, strength=strength):
                number = before + row
                if singles is not None:
                    words = _NO_WORD.sub("-", rows.labels[row])[:40].strip("-")
                    single = folder / singles.name / f"{number:03d}-{words}-{index:04d}.png"
                    own = recipe.single(row, rows.repeats[row] * num + index, size)
                    save_png(single, Image.fromarray(made), own.text())

                if number < MAX_ROWS and index < MAX_COLUMNS:
                    _, columns = shown[number]
                    columns.append(made.copy())  # a view would keep the whole batch

        if len(parts) > 1:
            shown = [("{}, {}x{}".format(label, *images[0].shape), images) for label, images in shown]

        title = settings_line(settings)
        if total > len(shown) * num_columns:
            title += f"; {len(shown)} of {len(lines)} rows, {num_columns} of {num} images each"

        grid = folder / path.name
        credit = ensemble.credit_line
        _, first_row = shown[0]
        save_png(grid, labelled_grid(shown, scale_of(first_row[0]), title, footer=credit), recipe.text())
        if trace is not None:
            files = write_trajectory(grid, trace, ensemble.field.cluster_names, labels, ensemble.decode, gif, credit)

        if singles is not None:
            for old in singles.glob("[0-9][0-9][0-9]*-*-*[0-9][0-9][0-9][0-9].png"):
                old.unlink()  # left by an earlier grid of this name

    return {name: path.with_name(file.name) for name, file in files.items()}


def settings_line(settings: SampleConfig) -> str:
    """Name the settings that matter most."""
    return (
        f"{settings.member or settings.strategy}, {settings.solver}, {settings.num_steps} steps, "
        f"guidance {settings.guidance_scale:g}"
    )


def check_out(out: str) -> Path:
    """Check the path given with ``--out``.

    Raises:
        UserError: neither a name that ends in ``.png`` nor a folder, or its parent folder is missing.
    """
    path = Path(out)
    is_place = path.is_dir() or path.suffix == ".png" or not (path.suffix or path.exists())
    if not (out and is_place and path.parent.is_dir()):
        raise UserError(f"--out {out!r}: give a folder, or a file that ends in .png, in a folder that exists")

    return path


def write_trajectory(
    path: Path,
    trace: Trace,
    names: Sequence[str],
    labels: Mapping[Key, str],
    decode: Callable[[Float[Tensor, "n c h w"]], UInt8[np.ndarray, "n h w 3"]],
    gif: bool = False,
    footer: str = "",
) -> dict[str, Path]:
    """Write the heat map, the strip and perhaps the GIF of ``trace`` beside the grid ``path``.

    Args:
        path: the grid's PNG file.
        trace: the trajectories; if it is empty, nothing is written.
        names: the experts' names.
        labels: label of each image whose trajectory is drawn.
        decode: turns latents into images.
        gif: whether to write the GIF.
        footer: small text below strip and GIF, such as a credit.

    Returns:
        Each file, by the name of what it shows.
    """
    if not trace.weights:
        return {}

    heat = path.with_name(f"{path.stem}-weights.png")
    mean = torch.stack(list(trace.weights.values())).mean(0)
    title = f"weights of the experts, mean of {len(trace.weights)} image(s)"
    save_png(heat, weights_chart(trace.times, {title: mean}, names))

    def decoded(num: int) -> tuple[list[str], list[tuple[str, list[np.ndarray]]]]:
        """At most ``num`` times, and for each image a labelled row of x_t and one of x_0."""
        num_times = len(trace.times)
        picked = torch.linspace(0, num_times - 1, min(num, num_times)).round().long()
        rows = []
        for key, label in labels.items():
            # Without a label, the row is called x_t.
            rows.append((f"{label}: x_t".lstrip(": "), list(decode(trace.x_t[key][picked]))))
            rows.append(("estimate of x_0", list(decode(trace.x_0[key][picked]))))

        return [f"{t:.2f}" for t in trace.times[picked].tolist()], rows

    strip = path.with_name(f"{path.stem}-trajectory.png")
    headings, rows = decoded(_STRIP_COLUMNS)
    _, first_row = rows[0]
    scale = scale_of(first_row[0])
    title = "time t of each column: 1 is noise, 0 the image"
    save_png(strip, labelled_grid(rows, scale, title, footer, headings))
    files = {"weights": heat, "trajectory": strip}
    if gif:
        headings, rows = decoded(_GIF_FRAMES)
        frames = []
        for column, time in enumerate(headings):
            images = [row[column] for _, row in rows]  # of x_t and x_0 in turn
            x_t = ("x_t", images[::2])
            x_0 = ("estimate of x_0", images[1::2])
            frames.append(labelled_grid([x_t, x_0], scale, f"t = {time}", footer))

        files["animation"] = path.with_suffix(".gif")
        frames[0].save(files["animation"], save_all=True, append_images=frames[1:], duration=100, loop=0)

    return files


def weights_chart(
    times: Float[Tensor, " num_times"], panels: Mapping[str, Float[Tensor, "steps K"]], names: Sequence[str]
) -> Image.Image:
    """Draw the weights of the experts by step, one panel per title."""
    height = 0.4 + 0.25 * len(names)
    figure = Figure(figsize=(7, 0.5 + len(panels) * height), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
    num_steps = len(times) - 1
    ticks = np.linspace(0, num_steps - 1, min(_MAX_TICKS, num_steps))
    steps = np.unique(ticks.round().astype(int))
    for axis, (title, weights) in zip(axes, panels.items(), strict=True):
        axis.imshow(weights.T.numpy(), aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=1)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(steps, [f"{times[step]:.2f}" for step in steps])
        axis.set_yticks(range(len(names)), names)

    axes[-1].set_xlabel("t at the start of each step (1 is noise)")
    figure.colorbar(axes[0].images[0], ax=list(axes), label="weight", aspect=12 * len(panels))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return Image.open(buffer)
