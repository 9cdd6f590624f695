"""The run folder: everything one experiment file produced, and where each thing lies in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ddm_lightning.config import Experiment, load_experiment, to_dict, to_yaml, with_defaults
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_text

# Sections that may change between two starts of one run: they shape no weight's meaning.
FREE_SECTIONS = ("run_dir", "island", "sample")
# Who prepares and where shards are uploaded to changes no byte of them.
FREE_KEYS = ("prepare.engine", "prepare.num_processes", "prepare.shards.remote")


@dataclass(frozen=True)
class RunFolder:
    """Paths below one run folder."""

    root: Path

    @classmethod
    def of(cls, experiment: Experiment) -> RunFolder:
        """The experiment's run folder, unchecked."""
        return cls(Path(experiment.run_dir))

    @property
    def experiment(self) -> Path:
        """The resolved experiment that this folder belongs to."""
        return self.root / "experiment.yaml"

    @property
    def prepared(self) -> Path:
        """What ``prepare`` writes."""
        return self.root / "prepared"

    @property
    def shards(self) -> Path:
        """The MDS shards, one folder a cluster."""
        return self.prepared / "shards"

    @property
    def ensemble(self) -> Path:
        """The ensemble's manifest."""
        return self.root / "ensemble.json"

    @property
    def samples(self) -> Path:
        """Pictures drawn from the ensemble."""
        return self.root / "samples"

    def member(self, name: str) -> Path:
        """Everything that one member writes; no other member reads or writes below it while training."""
        return self.root / "members" / name

    def artifact(self, name: str) -> Path:
        """What a finished member hands over."""
        return self.member(name) / "artifact"

    def is_finished(self, name: str) -> bool:
        """Whether the member has handed over its artifact."""
        return (self.artifact(name) / "member.json").exists()


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment of the run folder that ``path`` and ``overrides`` lead to, as that folder records it.

    Over the record win the sections ``island`` and ``sample`` of ``path``, and ``overrides``. A record is a ``path``,
    too: of its own folder, wherever that lies now. Where there is no record, it is the experiment in ``path``.

    Raises:
        UserError: as ``load_experiment``.
    """
    path = Path(path)
    experiment = load_experiment(path, overrides)
    is_record = path.name == "experiment.yaml" and (path.parent / "prepared").is_dir()
    if is_record and not any(text.startswith("run_dir=") for text in overrides):
        experiment.run_dir = str(path.parent)
    run = RunFolder.of(experiment)
    if not run.experiment.exists() or run.experiment.resolve() == path.resolve():
        return experiment
    recorded = load_experiment(path, overrides, record=run.experiment)
    recorded.run_dir = experiment.run_dir  # it may have been moved
    return recorded


def open_run(experiment: Experiment, *, create: bool) -> RunFolder:
    """The experiment's run folder, after a check that it was made by the same experiment.

    Args:
        create: whether to leave the resolved experiment in the folder, which is made when it is missing.

    Raises:
        UserError: the folder belongs to a different experiment (the line names the keys that changed),
            or is missing and ``create`` is false.
    """
    run = RunFolder.of(experiment)
    if not (run.experiment.exists() or create):
        raise UserError(f"{run.root}: no run here; start it with fit and the same FILE and settings")
    refuse_changed(experiment)
    if create and _recorded(run) != to_dict(experiment):
        # Where it is there already, only free sections differ.
        atomic_write_text(run.experiment, to_yaml(experiment))
    return run


def refuse_changed(experiment: Experiment) -> None:
    """Check that the experiment's run folder, where there is one, was made by the same experiment.

    Raises:
        UserError: the folder belongs to a different experiment; the line names the keys that changed.
    """
    run = RunFolder.of(experiment)
    # What was only prepared can be prepared anew: it knows what hangs on a changed key.
    if not run.experiment.exists() or not (run.root / "members").exists():
        return
    changed = changes(with_defaults(_recorded(run)), to_dict(experiment))
    if changed:
        raise UserError(
            f"{run.experiment}: the experiment changed since this run folder was made: {changed}; "
            f"set those keys back, or use another folder with run_dir=…"
        )


def _recorded(run: RunFolder) -> dict[str, Any]:
    """The experiment that the folder was made by; empty for a folder that is yet to be made."""
    if not run.experiment.exists():
        return {}
    try:
        old = yaml.safe_load(run.experiment.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            f"{run.experiment}: cannot be read ({str(error).splitlines()[0]}); restore or delete it"
        ) from None
    return old if isinstance(old, dict) else {}


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Dotted keys whose values differ, outside the sections that may change between two starts."""
    before, after = _flat(old, ""), _flat(new, "")
    return sorted(
        key
        for key in before.keys() | after.keys()
        if before.get(key) != after.get(key)
        and key.split(".")[0] not in FREE_SECTIONS
        and key not in FREE_KEYS
        and not (_is_raised(key, before, after) and _schedule(key, after) == "constant")
    )


def _is_raised(key: str, before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether ``key`` is a number of optimizer steps that grew: a finished member can then be trained on."""
    was, now = before.get(key), after.get(key)
    return key.endswith(".train.max_steps") and isinstance(was, int) and isinstance(now, int) and was < now


def _schedule(key: str, flat: dict[str, Any]) -> Any:
    return flat.get(f"{key.removesuffix('max_steps')}schedule")


def changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """``changed_keys`` and what they were, for a line; empty where there are none."""
    before, after = _flat(old, ""), _flat(new, "")

    def what(key: str) -> str:
        if key not in before:
            return f"{key} (was not set)"
        schedule = f", where the {_schedule(key, after)} schedule ends" if _is_raised(key, before, after) else ""
        return f"{key} (was {json.dumps(before[key])}{schedule})"

    return ", ".join(what(key) for key in changed_keys(old, new))


def _flat(value: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat = {}
    for key, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{key}" if prefix else str(key)))
    return flat
