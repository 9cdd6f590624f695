"""Rows of images: a prompt or a class each, with its condition and the key of its noise."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, Registry
from ddm_lightning.encoders.captions import encode_texts
from ddm_lightning.ensemble.routing import Key
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.members.artifact import REMEDY, ArtifactMeta
from ddm_lightning.members.run_folder import MEMBER_FILE

MAX_ROWS = 32
"""Largest number of rows in a grid."""
_Given = TypeVar("_Given")


class Row(NamedTuple):
    """A row of images."""

    label: str
    noise: str
    """First part of the keys of its noise."""
    condition: Condition | None = None
    repeats: int = 0
    """Number of earlier rows with the same ``noise``."""
    negative: Condition | None = None
    """Takes the place of the null condition in guidance; None for the null condition."""
    start: Float[Tensor, "c h w"] | None = None
    """x_0 of an image to start from; None to start from noise."""

    def key(self, index: int, num: int) -> Key:
        """Key of an image's noise in a row of ``num``; a repeated row continues the numbers of the earlier one."""
        return self.noise, self.repeats * num + index


def joined(conditions: Iterable[Condition | None]) -> Condition | None:
    """Join the conditions of rows; None if they have none."""
    given = [one for one in conditions if one is not None]
    return Condition.cat(given) if given else None


def listed(given: Any) -> list[Any]:
    """Return a list of one thing, of several, or of nothing if None is given."""
    if given is None:
        return []
    if isinstance(given, (np.ndarray, Tensor)):
        given = given.tolist()
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [given]

    return [one.item() if isinstance(one, np.generic) else one for one in given]


def spread(name: str, given: Sequence[_Given], num_rows: int) -> Sequence[_Given]:
    """Return one of ``given`` per row.

    Args:
        name: of the argument, for the error line.
        given: one for all, or one per row.
        num_rows: number of rows.

    Raises:
        UserError: another number.
    """
    if len(given) == 1:
        return [given[0]] * num_rows
    if len(given) != num_rows:
        raise UserError(f"{name}: {len(given)} for {num_rows} prompts; give one, or one per prompt")

    return given


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


def rows_of_prompts(prompts: Sequence[str], meta: ArtifactMeta) -> list[Row]:
    """Rows of texts.

    Raises:
        UserError: one is empty, or as ``text_condition``.
    """
    for prompt in prompts:
        if not prompt.strip():
            raise UserError("a prompt is empty; describe an image")

    condition = text_condition(prompts, meta)
    rows = []
    for row, prompt in enumerate(prompts):
        rows.append(Row(prompt, prompt, condition.rows(torch.tensor([row])), prompts[:row].count(prompt)))

    return rows


def rows_without_prompts(
    classes: Sequence[str | int], names: Sequence[str] | None, condition: ConditionSpec
) -> list[Row]:
    """Rows of classes, or one of the null condition if networks are not conditioned on classes.

    Args:
        classes: names or numbers; none for the first ``MAX_ROWS``.
        names: of all classes, if they have any.
        condition: of the networks.

    Raises:
        UserError: there is no such class, or several have the name.
    """
    if condition.kind != "class":
        return [Row("no condition", "no condition")]

    numbers = range(condition.size)
    names = names or [f"class {number}" for number in numbers]
    chosen: list[int] = []
    rows = []
    for given in classes or numbers[:MAX_ROWS]:
        num_named = names.count(given)
        if num_named == 1:
            number = names.index(given)
        elif num_named == 0 and str(given) in map(str, numbers):
            number = int(given)
        else:
            problem = "several classes have this name" if num_named else "no such class"
            raise UserError(
                f"class {given!r}: {problem}; give a number from 0 to {numbers[-1]}, or a name such as "
                f"{', '.join(names[:5])}"
            )

        one = Condition.of(torch.tensor([number]))
        rows.append(Row(names[number], f"class {number}", one, chosen.count(number)))
        chosen.append(number)

    return rows


def with_negatives(rows: Sequence[Row], texts: Sequence[str], meta: ArtifactMeta) -> list[Row]:
    """Give rows their negative prompts.

    Args:
        rows: from ``rows_of_prompts``.
        texts: one for all, or one per row; an empty one stands for the null condition.
        meta: of an expert.

    Raises:
        UserError: another number of texts, one is no text, or as ``text_condition``.
    """
    if not all(isinstance(text, str) for text in texts):
        raise UserError("negative_prompt: give a text, or one per prompt")

    is_empty = torch.tensor([not text.strip() for text in texts])
    condition = text_condition(texts, meta).dropped(is_empty)
    each = [condition.rows(torch.tensor([number])) for number in range(len(texts))]
    negatives = spread("negative_prompt", each, len(rows))
    return [row._replace(negative=negative) for row, negative in zip(rows, negatives, strict=True)]
