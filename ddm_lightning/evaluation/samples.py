"""Labelled grids of images drawn from a finished ensemble, and the images alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress

from ddm_lightning.config import Experiment
from ddm_lightning.core.devices import check_devices, device_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import member_columns
from ddm_lightning.core.grids import labelled_grid, save_png
from ddm_lightning.core.registry import CAPTION_ENCODERS, IMAGE_ENCODERS
from ddm_lightning.ensemble.load import LoadedEnsemble, load_ensemble
from ddm_lightning.ensemble.routing import strategy_of
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.member import condition_spec
from ddm_lightning.shards.manifest import Manifest, manifest_path

# Height in pixels at which small pictures are shown.
CELL_SIZE = 72
# Pictures computed at once; changes no picture.
BATCH_SIZE = 64
# Largest grid; what is beyond it is written as single images only.
MAX_ROWS, MAX_COLUMNS = 32, 32


def prompt_condition(prompts: Sequence[str], experiment: Experiment) -> Condition:
    """The text vectors, or tokens, of ``prompts``, by the experiment's caption encoder.

    Raises:
        UserError: the experiment is not conditioned on text, or a prompt is empty.
    """
    plugin, kind = experiment.prepare.caption_encoder, experiment.condition.kind
    if kind not in ("text", "tokens") or plugin is None:
        raise UserError(f"--prompt: {experiment.name} is conditioned on {kind!r}, not on text")
    if any(not prompt.strip() for prompt in prompts):
        raise UserError("--prompt: a prompt is empty; say what to draw")
    encoder = CAPTION_ENCODERS.build(plugin.name, plugin.params)
    encode = encoder.tokens if kind == "tokens" else encoder.vectors
    return Condition.of(torch.from_numpy(encode(list(prompts))))


def _class_number(given: str, experiment: Experiment, manifest: Manifest) -> int:
    """The class that ``--class`` names or numbers; a name goes first.

    Raises:
        UserError: the experiment is not conditioned on a class, or there is no such class.
    """
    if experiment.condition.kind != "class":
        raise UserError(f"--class: {experiment.name} is conditioned on {experiment.condition.kind!r}, not on a class")
    names = manifest.class_names or []
    if given in names:
        return names.index(given)
    if given.isdecimal() and int(given) < manifest.num_classes:
        return int(given)
    some = f", or a name such as {', '.join(names[:5])}" if names else ""
    raise UserError(f"--class {given!r}: is no class; give a number from 0 to {manifest.num_classes - 1}{some}")


def row_conditions(
    prompts: Sequence[str], classes: Sequence[str], experiment: Experiment, manifest: Manifest
) -> list[tuple[str, str, Condition | None]]:
    """Label, key of the noise and condition of each row: the prompts, the classes, or one unconditional row.

    Raises:
        UserError: as ``prompt_condition``, or a class that is not there.
    """
    numbers = [_class_number(given, experiment, manifest) for given in classes]
    if prompts:
        condition = prompt_condition(prompts, experiment)
        return [(prompt, prompt, condition.rows(torch.tensor([i]))) for i, prompt in enumerate(prompts)]
    if experiment.condition.kind == "class":
        names = manifest.class_names or [f"class {c}" for c in range(manifest.num_classes)]
        shown = numbers or range(min(manifest.num_classes, MAX_ROWS))
        return [(names[c], f"class {c}", Condition.of(torch.tensor([c]))) for c in shown]
    return [("no condition", "no condition", None)]


def sample_grid(
    loaded: LoadedEnsemble,
    experiment: Experiment,
    rows: Sequence[tuple[str, str, Condition | None]],
    credit: str = "",
    singles: Path | None = None,
    show_progress: bool = False,
) -> Image.Image:
    """Draw ``sample.num_per_prompt`` images a row, in batches: memory does not grow with their number.

    Args:
        loaded: the ensemble, on the device that is to sample.
        experiment: its seed, image encoder and ``sample`` section.
        rows: see ``row_conditions``.
        credit: of the data set, printed below the grid.
        singles: folder to which each image is written as soon as it is there; None draws only what the grid shows.
        show_progress: whether there is a progress bar on stderr.

    Returns:
        The grid, of at most ``MAX_ROWS`` by ``MAX_COLUMNS`` images.
    """
    settings, plugin = experiment.sample, experiment.prepare.image_encoder
    num = settings.num_per_prompt
    if singles is None:
        rows, num = rows[:MAX_ROWS], min(num, MAX_COLUMNS)
    encoder = IMAGE_ENCODERS.build(plugin.name, plugin.params)
    strategy = strategy_of(settings)
    shown: list[tuple[str, list[np.ndarray]]] = [(label, []) for label, _, _ in rows[:MAX_ROWS]]
    total = num * len(rows)
    with Progress(*member_columns(), console=Console(stderr=True), disable=not show_progress) as progress:
        task = progress.add_task("images", total=total, note="")
        for first in range(0, total, BATCH_SIZE):
            places = [divmod(i, num) for i in range(first, min(first + BATCH_SIZE, total))]
            conditions = [condition for condition in (rows[row][2] for row, _ in places) if condition is not None]
            x_0 = sample(
                loaded.ensemble,
                Condition.cat(conditions) if conditions else None,
                len(places),
                loaded.meta.x_shape,
                strategy=strategy,
                solver=settings.solver,
                num_steps=settings.num_steps,
                shift=loaded.meta.timestep_shift,
                guidance_scale=settings.guidance_scale,
                seed=experiment.seed,
                batch_size=BATCH_SIZE,
                keys=[(rows[row][1], index) for row, index in places],
                progress=lambda done, first=first: progress.update(task, completed=first + done),  # type: ignore[misc]
            )
            for (row, index), image in zip(places, encoder.decode(x_0), strict=True):
                if singles is not None:
                    words = re.sub(r"\W+", "-", rows[row][0])[:40].strip("-")
                    save_png(singles / f"{row:03d}-{words}-{index:04d}.png", Image.fromarray(image))
                if row < MAX_ROWS and index < MAX_COLUMNS:
                    shown[row][1].append(image.copy())  # not a view, which would keep the batch
    title = f"{settings.strategy}, {settings.solver}, {settings.num_steps} steps, guidance {settings.guidance_scale:g}"
    if total > sum(len(images) for _, images in shown):
        title += f"; {len(shown)} of {len(rows)} rows, {min(num, MAX_COLUMNS)} of {num} images each"
    scale = max(1, CELL_SIZE // shown[0][1][0].shape[0])
    return labelled_grid(shown, scale, title, footer=f"Trained on: {credit}" if credit else "")


def check_out(out: str) -> Path:
    """The PNG file, or the folder, that the user asked for.

    Raises:
        UserError: neither a name that ends in ``.png`` nor a folder, or the folder around it is missing.
    """
    path = Path(out)
    if not out or not (path.is_dir() or path.suffix == ".png" or not (path.suffix or path.exists())):
        raise UserError(f"--out {out!r}: give a folder, or a file that ends in .png")
    if not path.parent.is_dir():
        raise UserError(f"--out {out!r}: folder {path.parent} does not exist; make it first")
    return path


def draw_run(
    run_dir: Path,
    experiment: Experiment,
    prompts: Sequence[str],
    path: Path,
    *,
    classes: Sequence[str] = (),
    singles: Path | None = None,
    show_progress: bool = False,
) -> None:
    """Write the grid of a run's ensemble to the PNG ``path``, a row a prompt or class; see ``sample_grid``.

    It samples on the island's device.

    Raises:
        UserError: no ensemble, a damaged artifact or one of other data, an empty prompt, no such class or device.
    """
    accelerator = experiment.island.accelerator
    check_devices(accelerator, 1)
    manifest = Manifest.read(run_dir)
    rows = row_conditions(prompts, classes, experiment, manifest) if prompts or classes else None
    loaded = load_ensemble(run_dir, device_of(accelerator))
    found = (loaded.meta.x_shape, loaded.meta.condition)
    if found != (manifest.x_shape, condition_spec(experiment, manifest).to_dict()):
        raise UserError(
            f"{manifest_path(run_dir)}: the experts were trained on other data ({found[0]}, {found[1]}); "
            "copy the manifest from where they were trained"
        )
    rows = rows or row_conditions((), (), experiment, manifest)
    save_png(path, sample_grid(loaded, experiment, rows, manifest.attribution, singles, show_progress))
