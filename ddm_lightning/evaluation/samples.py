"""Labelled grids of pictures drawn from a finished ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from ddm_lightning.config import Experiment, SampleConfig
from ddm_lightning.ensemble.load import LoadedEnsemble, load_ensemble
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.errors import UserError
from ddm_lightning.flow.condition import Condition
from ddm_lightning.pictures import labelled_grid, save_png
from ddm_lightning.prepare.manifest import Manifest, manifest_path
from ddm_lightning.prepare.registry import CAPTION_ENCODERS, IMAGE_ENCODERS
from ddm_lightning.training.member_network import condition_spec

# Height in pixels at which small pictures are shown.
CELL_SIZE = 72
# Pictures computed at once; changes no picture.
BATCH_SIZE = 64


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


def row_conditions(
    prompts: Sequence[str], experiment: Experiment, manifest: Manifest
) -> list[tuple[str, Condition | None]]:
    """The rows of a sample grid: the prompts, or every class, or one unconditional row.

    Raises:
        UserError: as ``prompt_condition``.
    """
    kind = experiment.condition.kind
    if prompts:
        condition = prompt_condition(prompts, experiment)
        return [(prompt, condition.rows(torch.tensor([i]))) for i, prompt in enumerate(prompts)]
    if kind == "class":
        return [(f"class {c}", Condition.of(torch.tensor([c]))) for c in range(manifest.num_classes)]
    return [("no condition", None)]


def sample_grid(
    loaded: LoadedEnsemble,
    experiment: Experiment,
    rows: Sequence[tuple[str, Condition | None]],
    settings: SampleConfig,
    credit: str = "",
) -> Image.Image:
    """Draw ``settings.num_per_prompt`` pictures a row.

    Args:
        rows: label and condition (one row of it) of each grid row.
        settings: strategy, solver, steps, guidance and number of columns.
        credit: of the data set, printed below the grid.
    """
    columns = settings.num_per_prompt
    condition = None
    if rows[0][1] is not None:
        repeats = [c.rows(torch.zeros(columns, dtype=torch.int64)) for _, c in rows if c is not None]
        condition = Condition.cat(repeats)
    x_0 = sample(
        loaded.ensemble,
        condition,
        columns * len(rows),
        loaded.meta.x_shape,
        strategy=settings.strategy,
        top_k=settings.top_k,
        solver=settings.solver,
        num_steps=settings.num_steps,
        shift=loaded.meta.timestep_shift,
        guidance_scale=settings.guidance_scale,
        seed=experiment.seed,
        batch_size=BATCH_SIZE,
    )
    encoder = IMAGE_ENCODERS.build(experiment.prepare.image_encoder.name, experiment.prepare.image_encoder.params)
    images = encoder.decode(x_0)
    title = f"{settings.strategy}, {settings.solver}, {settings.num_steps} steps, guidance {settings.guidance_scale:g}"
    pictures = [(label, list(images[i * columns : (i + 1) * columns])) for i, (label, _) in enumerate(rows)]
    scale = max(1, CELL_SIZE // images.shape[1])
    return labelled_grid(pictures, scale, title, footer=f"Trained on: {credit}" if credit else "")


def check_out(out: str) -> Path:
    """The picture file that the user asked for.

    Raises:
        UserError: ``out`` is no ``.png``, or its folder is missing.
    """
    path = Path(out)
    if path.suffix != ".png" or path.is_dir():
        raise UserError(f"--out {out!r}: give a file that ends in .png")
    if not path.parent.is_dir():
        raise UserError(f"--out {out!r}: folder {path.parent} does not exist; make it first")
    return path


def draw_run(run_dir: Path, experiment: Experiment, prompts: Sequence[str], path: Path) -> None:
    """Write the grid of a run's ensemble to the PNG ``path``, a row a prompt.

    Raises:
        UserError: no ensemble, a damaged artifact or one of other data, or a prompt that is empty.
    """
    manifest = Manifest.read(run_dir)
    rows = row_conditions(prompts, experiment, manifest) if prompts else None
    loaded = load_ensemble(run_dir)
    found = (loaded.meta.x_shape, loaded.meta.condition)
    if found != (manifest.x_shape, condition_spec(experiment, manifest).to_dict()):
        raise UserError(
            f"{manifest_path(run_dir)}: the experts were trained on other data ({found[0]}, {found[1]}); "
            "copy the manifest from where they were trained"
        )
    rows = rows or row_conditions((), experiment, manifest)
    grid = sample_grid(loaded, experiment, rows, experiment.sample, manifest.attribution)
    save_png(path, grid)
