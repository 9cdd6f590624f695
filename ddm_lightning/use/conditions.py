"""Prompts and classes as conditions of samples."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from ddm_lightning.config.experiment import Experiment, PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, Registry
from ddm_lightning.flow.condition import Condition

Row: TypeAlias = tuple[str, str, Condition | None]
"""Label, noise key and condition of a row of images."""

MAX_ROWS = 32
"""Largest number of rows in a grid."""


@functools.lru_cache(maxsize=2)  # some load for seconds
def _built(registry: Registry, name: str, params: str) -> Any:
    return registry.build(name, json.loads(params))


def built_encoder(registry: Registry, plugin: PluginConfig) -> Any:
    """Build an encoder, or take the one built before with the same params."""
    return _built(registry, plugin.name, json.dumps(plugin.params))


def text_condition(texts: Sequence[str], experiment: Experiment) -> Condition:
    """Encode ``texts`` as vectors or tokens with the experiment's caption encoder."""
    plugin = experiment.prepare.caption_encoder
    assert plugin is not None, "check_experiment asks for one"
    encoder = built_encoder(CAPTION_ENCODERS, plugin)
    encode = encoder.tokens if experiment.condition.kind == "tokens" else encoder.vectors
    return Condition.of(torch.from_numpy(encode(list(texts))))


def prompt_condition(prompts: Sequence[str], experiment: Experiment) -> Condition:
    """Encode ``prompts``; see ``text_condition``.

    Raises:
        UserError: the experiment is not conditioned on text, or a prompt is empty.
    """
    if (kind := experiment.condition.kind) not in ("text", "tokens"):
        raise UserError(f"--prompt: {experiment.name} is conditioned on {kind!r}, not on text; leave --prompt out")
    if any(not prompt.strip() for prompt in prompts):
        raise UserError("--prompt: a prompt is empty; describe an image")
    return text_condition(prompts, experiment)


def row_conditions(
    prompts: Sequence[str],
    classes: Sequence[str],
    experiment: Experiment,
    class_names: Sequence[str] | None,
    num_classes: int,
) -> list[Row]:
    """Condition the rows: one per prompt or class; without any, the first classes or one unconditional row.

    Raises:
        UserError: as ``prompt_condition``, or a class does not exist.
    """
    numbers = [_class_number(given, experiment, class_names or (), num_classes) for given in classes]
    if prompts:
        condition = prompt_condition(prompts, experiment)
        return [(prompt, prompt, condition.rows(torch.tensor([i]))) for i, prompt in enumerate(prompts)]
    if experiment.condition.kind == "class":
        names = class_names or [f"class {c}" for c in range(num_classes)]
        shown = numbers or range(min(num_classes, MAX_ROWS))
        return [(names[c], f"class {c}", Condition.of(torch.tensor([c]))) for c in shown]
    return [("no condition", "no condition", None)]


def _class_number(given: str, experiment: Experiment, names: Sequence[str], num_classes: int) -> int:
    """Look up a class by name or, failing that, by number.

    Raises:
        UserError: the experiment is not conditioned on classes, or the class does not exist.
    """
    if experiment.condition.kind != "class":
        raise UserError(f"--class: {experiment.name} is conditioned on {experiment.condition.kind!r}, not on a class")
    if given in names:
        return names.index(given)
    if given.isdecimal() and int(given) < num_classes:
        return int(given)
    some = f", or a name such as {', '.join(names[:5])}" if names else ""
    raise UserError(f"--class {given!r}: no such class; give a number from 0 to {num_classes - 1}{some}")
