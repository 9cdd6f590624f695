"""Load an experiment file: merge ``key=value`` overrides (OmegaConf), check, and write it out again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddm_lightning.config.experiment import Experiment, PluginConfig, PrepareConfig
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core import schema
from ddm_lightning.core.errors import UserError


def load_experiment(path: str | Path, overrides: Sequence[str] = (), record: Path | None = None) -> Experiment:
    """Read, merge and check an experiment file.

    Args:
        path: the YAML file.
        overrides: ``key=value`` pairs in OmegaConf's dot-list form; they win over the file. Mappings merge, but a
            plug-in with another ``name`` keeps none of the previous params.
        record: a resolved experiment to start from; only the sections ``island`` and ``sample`` of ``path`` then count.

    Returns:
        The experiment as plain dataclasses, every interpolation resolved.

    Raises:
        UserError: missing file, YAML syntax, unknown key, wrong type, missing value or contradiction.
    """
    path = Path(path)
    changes = [(str(path), schema.read_yaml(path))]
    if record is not None:
        free = OmegaConf.masked_copy(changes[0][1], ["island", "sample"])
        changes = [(str(record), schema.read_yaml(record)), (str(path), free)]
    # Names first: a new name drops params, also if it was typed after them.
    ordered = sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".name"))
    changes += [(f"{path} with {text!r}", schema.read_override(text, str(path))) for text in ordered]
    try:
        merged = OmegaConf.structured(Experiment)
        for source, change in changes:
            schema.check(OmegaConf.to_container(change, resolve=False), Experiment, "", source)
            _forget_params(merged, change)
            merged = OmegaConf.merge(merged, change)
        schema.check_complete(OmegaConf.to_container(merged, resolve=False), Experiment, str(path))
        resolved = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        problem = schema.first_line(error)
        raise UserError(f"{path}: key {error.full_key!r}: {problem}; fix the reference ${{…}} in it") from None
    schema.check(resolved, Experiment, "", str(path), references=False)
    experiment: Experiment = schema.build(resolved, Experiment)
    check_experiment(experiment, path, overrides)
    return experiment


def _forget_params(merged: Any, change: Any) -> None:
    """Empty the params of each plug-in whose name ``change`` replaces."""
    for key in change:
        # Unresolved: references cannot be followed before everything is merged.
        node, given = merged._get_node(key), change._get_node(key)
        if not all(isinstance(one, DictConfig) and not one._is_none() for one in (node, given)):
            continue
        if OmegaConf.get_type(node) is PluginConfig:
            if "name" in given and not OmegaConf.is_missing(node, "name") and given["name"] != node["name"]:
                node["params"] = {}
        else:
            _forget_params(node, given)


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """The experiment as plain nested dicts, ready for YAML or JSON."""
    return asdict(experiment)


def with_defaults(recorded: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of newer keys to an experiment that an older version recorded."""
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Experiment), OmegaConf.create(recorded))
        filled = OmegaConf.to_container(merged, resolve=False)
    except OmegaConfBaseException:  # removed keys or invalid values
        return recorded
    assert isinstance(filled, dict)
    return {str(key): value for key, value in filled.items()}


def to_yaml(experiment: Experiment) -> str:
    """The resolved experiment as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(experiment)))


def prepare_to_json(config: PrepareConfig) -> str:
    """The ``prepare`` section as JSON, for another process."""
    return json.dumps(asdict(config), sort_keys=True)


def prepare_from_json(text: str) -> PrepareConfig:
    """The inverse of ``prepare_to_json``."""
    section: PrepareConfig = schema.build(json.loads(text), PrepareConfig)
    return section
