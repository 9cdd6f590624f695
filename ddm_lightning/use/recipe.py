"""What a PNG says about how its images were made: to read, and to make them again.

Images to start from are opened here, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ddm_lightning import __version__
from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import parse_json
from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.rows import Row

_KEYWORD = "ddm_lightning"
"""Keyword of the text chunk with the recipe."""
_REMEDY = "give a PNG of the command sample, or the prompt and the settings themselves"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How images were made: with it, the same ensemble on the same device makes them again."""

    version: checks.Text
    """Release of ddm_lightning."""
    name: checks.Text
    """Name of the experiment."""
    ensemble: checks.Sha256
    """``EnsembleManifest.sha256``."""
    seed: checks.Count
    sample: SampleConfig
    """Settings of sampling, with the prompts of all rows."""
    classes: list[checks.Count]
    """Class of each row; empty without classes."""
    index: checks.Count | None
    """Number of a single image among those of its prompt or class; None for a grid."""
    negative_prompt: str
    """Text in place of the null condition; empty for none."""
    image: checks.Sha256 | None
    """SHA-256 of the file of the image that the images start from; None for noise."""
    strength: checks.Amount
    """Share of the steps that are run from the noisy image."""

    def applied(self, manifest: EnsembleManifest, overrides: Sequence[str], source: Path) -> EnsembleManifest:
        """An ensemble with the recipe's seed and settings, except those that ``overrides`` name.

        Args:
            manifest: of the ensemble that made the images.
            overrides: ``key=value`` pairs that the settings of ``manifest`` already have; those they name stay.
            source: begins the error line.

        Raises:
            UserError: another ensemble made the images.
        """
        about = manifest.description
        if manifest.sha256 != self.ensemble:
            raise UserError(
                f"{source}: was made with {self.name!r}, member {self.sample.member!r}, SHA-256 {self.ensemble[:12]}…, "
                f"and this is {about.name!r}, SHA-256 {manifest.sha256[:12]}…; give that one with -c"
            )

        kept = {"member", "resident_experts", *re.findall(r"(?m)^sample\.(\w+)", "\n".join(overrides))}
        own = {}
        for name, value in vars(about.sample).items():
            if kept & {name, name.removesuffix("_params")}:
                own[name] = value

        return replace(manifest, about=replace(about, seed=self.seed, sample=replace(self.sample, **own)))


@contextmanager
def _opened(path: Path, formats: list[str], problem: str, remedy: str) -> Iterator[Image.Image]:
    try:
        with Image.open(path, formats=formats) as image:
            yield image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: {problem} ({first_line(error)}); {remedy}") from None


def read_recipe(path: Path) -> Recipe:
    """Read the recipe in a PNG, perhaps a stranger's; its pixels are not decoded.

    Raises:
        UserError: the file is missing, no PNG or damaged, or has no recipe or a wrong one.
    """
    with _opened(path, ["PNG"], "does not say how it was made", _REMEDY) as image:
        if _KEYWORD not in image.info:
            raise UserError(f"{path}: does not say how it was made; {_REMEDY}")

        recipe = parse_json(image.info[_KEYWORD])

    return checks.record(recipe, Recipe, str(path), _REMEDY)


def open_image(path: Path) -> Image.Image:
    """Open and decode an image, of formats that Pillow passes to no other program.

    Raises:
        UserError: the file is missing, damaged, or of another format.
    """
    formats = ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"]
    with _opened(path, formats, "cannot be read as an image", "give a PNG, JPEG or WEBP") as image:
        image.load()
        return image


def recipe_texts(
    ensemble: DecentralizedEnsemble, rows: Sequence[Row], start: Mapping[str, Any], index: int | None = None
) -> PngInfo:
    """Text chunks of a PNG: the recipe as JSON, and ``parameters`` in the form that viewers know from web UIs.

    Args:
        ensemble: with the settings of the images.
        rows: of the grid, or the one of a single image.
        start: ``negative_prompt``, ``image`` and ``strength`` of ``Recipe``.
        index: number of a single image; None for a grid.
    """
    prompts = []
    classes = []
    for row in rows:
        if row.condition is None:
            continue
        if ensemble.meta.condition.kind == "class":
            classes.append(int(row.condition.values))
        else:
            prompts.append(row.label)

    about = ensemble.about
    sample = replace(about.sample, prompts=prompts)
    if index is not None:
        sample.num_per_prompt = 1

    recipe = Recipe(
        version=__version__,
        name=about.name,
        ensemble=ensemble.manifest.sha256,
        seed=about.seed,
        sample=sample,
        classes=classes,
        index=index,
        **start,
    )
    lines = [row.label for row in rows]
    if recipe.negative_prompt:
        lines.append(f"Negative prompt: {recipe.negative_prompt}")

    settings = (
        f"Steps: {sample.num_steps}, Sampler: {sample.solver}, CFG scale: {sample.guidance_scale}, Seed: {about.seed}, "
        f"Model hash: {recipe.ensemble[:10]}, Model: {about.name}, Strategy: {sample.member or sample.strategy}, "
        f"Version: ddm_lightning {__version__}"
    )
    if recipe.image is not None:
        settings += f", Denoising strength: {recipe.strength}"

    lines.append(settings)
    info = PngInfo()
    info.add_text("parameters", "\n".join(lines))  # as UTF-8 if Latin-1 is not enough
    info.add_text(_KEYWORD, json.dumps(asdict(recipe)))
    return info
