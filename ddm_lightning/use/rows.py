"""Rows of images: a prompt or a class each, with conditions and keys of noise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, Registry
from ddm_lightning.encoders.captions import encode_texts
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.meta import REMEDY, ArtifactMeta
from ddm_lightning.members.run_folder import MEMBER_FILE

MAX_ROWS = 32
"""Largest number of rows in a grid."""


@dataclass
class Rows:
    """Rows of images: a prompt or a class each."""

    labels: Sequence[str]
    noise: Sequence[str]
    """First part of the keys of each row's noise."""
    condition: Condition | None = None
    """One per row; None for the null condition in all."""
    negative: Condition | None = None
    """One per row, to take the place of the null condition in guidance; None for the null condition."""
    start: Float[Tensor, "num_rows c h w"] | None = None
    """x_0 of the image that each row starts from; None to start from noise."""
    x_shape: tuple[int, int, int] | None = None
    """Channels, height and width of the samples; None for the experts' own ``x_shape``."""

    def __post_init__(self) -> None:
        self.repeats = [self.noise[:row].count(own) for row, own in enumerate(self.noise)]
        """Number of earlier rows with the same ``noise``."""

    def key(self, number: int, num: int) -> tuple[int | str, ...]:
        """Key of an image's noise, with its ``x_shape``; a repeated row continues the numbers of the earlier one.

        Args:
            number: the first row's images come first, from 0 to ``num - 1``, then the second row's.
            num: images per row.
        """
        row, index = divmod(number, num)
        return self.noise[row], self.repeats[row] * num + index, *(self.x_shape or ())


def listed(given: Any) -> list[Any]:
    """Return a list of one thing, of several, or of nothing if None is given."""
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]

    return [one.item() if hasattr(one, "item") else one for one in given]


def spread(name: str, num: int, num_rows: int) -> Int[Tensor, " num_rows"]:
    """Return the number of the thing that each row takes.

    Args:
        name: of the argument, for the error line.
        num: number of things: one for all, or one per row.
        num_rows: number of rows.

    Raises:
        UserError: another number.
    """
    if num not in (1, num_rows):
        raise UserError(f"{name}: {num} for {num_rows} prompts; give one, or one per prompt")

    return torch.arange(num_rows) % num


@lru_cache(maxsize=2)  # some take seconds to load
def _built(registry: Registry, name: str, params: str) -> Any:
    return registry.build(name, json.loads(params))


def built_encoder(registry: Registry, plugin: PluginConfig) -> Any:
    """Build an encoder, or take the one built before with the same params."""
    return _built(registry, plugin.name, json.dumps(plugin.params))


def text_condition(texts: Sequence[str], meta: ArtifactMeta) -> Condition:
    """Encode ``texts`` as vectors, tokens or both with the caption encoder of the experts.

    Raises:
        UserError: one is not UTF-8, or there is no caption encoder.
    """
    if re.search(r"[\ud800-\udfff]", "".join(texts)):  # as Python reads other bytes
        raise UserError("a prompt is not UTF-8; set the terminal's encoding to it")
    if meta.caption_encoder is None:
        raise UserError(f"{meta.member}: key 'caption_encoder' is null in {MEMBER_FILE}; {REMEDY}")

    return encode_texts(list(texts), built_encoder(CAPTION_ENCODERS, meta.caption_encoder), meta.condition.kind)


def rows_without_prompts(classes: Sequence[str | int], names: Sequence[str] | None, condition: ConditionSpec) -> Rows:
    """Rows of classes, or one of the null condition if networks are not conditioned on classes.

    Args:
        classes: names or numbers; none for the first ``MAX_ROWS``.
        names: of all classes, if they have any.
        condition: of the networks.

    Raises:
        UserError: there is no such class, or several have the name.
    """
    if condition.kind != "class":
        return Rows(["no condition"], ["no condition"])

    numbers = range(condition.size)
    names = names or [f"class {number}" for number in numbers]
    chosen = []
    for given in classes or numbers[:MAX_ROWS]:
        num_named = names.count(given)
        if num_named == 1:
            chosen.append(names.index(given))
        elif num_named == 0 and str(given) in map(str, numbers):
            chosen.append(int(given))
        else:
            problem = "several classes have this name" if num_named else "no such class"
            raise UserError(
                f"class {given!r}: {problem}; give a number from 0 to {numbers[-1]}, or a name such as "
                f"{', '.join(names[:5])}"
            )

    labels = [names[number] for number in chosen]
    return Rows(labels, [f"class {number}" for number in chosen], Condition.of(torch.tensor(chosen)))
