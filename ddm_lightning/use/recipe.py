"""What a PNG says about how its images were made: to read, and to make them again.

Images to start from are opened here, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core import checks
from ddm_lightning.core.buckets import Size
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import parse_json
from ddm_lightning.ensemble.manifest import EnsembleManifest

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
        own = {name: value for name, value in vars(about.sample).items() if kept & {name, name.removesuffix("_params")}}
        return replace(manifest, about=replace(about, seed=self.seed, sample=replace(self.sample, **own)))

    def single(self, row: int, index: int, size: Size | None) -> Recipe:
        """Recipe of one image of a grid: its prompt or class, its number among those of it, and its size."""
        own = slice(row, row + 1)
        sample = replace(self.sample, prompts=self.sample.prompts[own], num_per_prompt=1, size=size)
        return replace(self, sample=sample, classes=self.classes[own], index=index)

    def text(self) -> PngInfo:
        """The recipe as a text chunk of a PNG."""
        info = PngInfo()
        info.add_text(_KEYWORD, json.dumps(asdict(self)))
        return info


def read_recipe(path: Path) -> Recipe:
    """Read the recipe in a PNG, perhaps a stranger's.

    Raises:
        UserError: as ``open_image``, or the file has no recipe or a wrong one.
    """
    image = open_image(path)
    try:
        recipe = parse_json(image.info.get(_KEYWORD, ""))
    except ValueError as error:
        raise UserError(f"{path}: does not say how it was made ({first_line(error)}); {_REMEDY}") from None

    return checks.record(recipe, Recipe, str(path), _REMEDY)


def open_image(path: Path) -> Image.Image:
    """Open and decode an image, of formats that Pillow passes to no other program.

    Raises:
        UserError: the file is missing, damaged, or of another format.
    """
    try:
        with Image.open(path, formats=["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"]) as image:
            image.load()
            return image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: cannot be read as an image ({first_line(error)}); give a PNG, JPEG or WEBP") from None
