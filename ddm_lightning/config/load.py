"""An experiment file, merged with ``key=value`` overrides (OmegaConf), checked, and written out again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddm_lightning import schema
from ddm_lightning.config.check import check_experiment
from ddm_lightning.config.data import PrepareConfig
from ddm_lightning.config.experiment import Experiment
from ddm_lightning.errors import UserError


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read, merge and check an experiment file.

    Args:
        path: the YAML file.
        overrides: ``key=value`` pairs in OmegaConf's dot-list form; they win over the file.

    Returns:
        The experiment as plain dataclasses, every interpolation resolved.

    Raises:
        UserError: missing file, YAML syntax, unknown key, wrong type, missing value or contradiction.
    """
    path = Path(path)
    changes = [(str(path), schema.read_yaml(path))]
    changes += [(f"{path} with {text!r}", schema.read_override(text, str(path))) for text in overrides]
    try:
        merged = OmegaConf.structured(Experiment)
        for source, change in changes:
            schema.check(OmegaConf.to_container(change, resolve=False), Experiment, "", source)
            merged = OmegaConf.merge(merged, change)
        schema.check_complete(OmegaConf.to_container(merged, resolve=False), Experiment, str(path))
        resolved = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        problem = schema.first_line(error)
        raise UserError(f"{path}: key {error.full_key!r}: {problem}; mend the reference ${{…}} in it") from None
    schema.check(resolved, Experiment, "", str(path), references=False)
    experiment: Experiment = schema.build(resolved, Experiment)
    check_experiment(experiment, path)
    return experiment


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """The experiment as plain nested dicts, ready for YAML or JSON."""
    return asdict(experiment)


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
