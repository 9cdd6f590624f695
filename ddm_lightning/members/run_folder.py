"""The run folder: everything one experiment file produced, where it is, and how its records are checked."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import Timeout
from omegaconf import OmegaConf

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import changeable_keys, leaves, load_experiment, read_yaml
from ddm_lightning.core import remote
from ddm_lightning.core.checks import kept
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import locked

MEMBER_FILE = "member.json"
"""Description of an artifact's weights."""
SIGNATURE = "model.sig"
STATEMENT = "signed.json"
"""Signature of an artifact, and what it says besides (``members.signatures``); absent without keys."""
ENSEMBLE_FILE = "ensemble.json"


@dataclass(unsafe_hash=True)
class RunFolder:
    """Paths inside one run folder."""

    root: Path

    def __post_init__(self) -> None:
        self.experiment = self.root / "experiment.yaml"
        """The resolved experiment of this folder."""
        self.prepared = self.root / "prepared"
        """Output of ``prepare``."""
        self.shards = self.prepared / "shards"
        """MDS shards, one folder per cluster."""
        self.initial = self.root / "initial"
        """Weights that members start from, by their hash."""
        self.ensemble = self.root / ENSEMBLE_FILE
        """The ensemble's manifest."""
        self.samples = self.root / "samples"
        """Images sampled from the ensemble."""

    @classmethod
    def of(cls, experiment: Experiment) -> RunFolder:
        """The experiment's run folder, unchecked."""
        return cls(Path(experiment.run_dir).expanduser())

    def member(self, name: str) -> Path:
        """Everything one member writes; no other member uses it during training."""
        return self.root / "members" / name

    def artifact(self, name: str) -> Path:
        """Artifact of a finished member."""
        return self.member(name) / "artifact"

    def sampled_from(self, member: str | None) -> Path:
        """File that describes the weights to sample from: those of ``member`` alone, or of the ensemble."""
        if member is None:
            return self.ensemble

        return self.artifact(member) / MEMBER_FILE

    def has_artifact(self, name: str) -> bool:
        """Whether the member has handed over its artifact."""
        return (self.artifact(name) / MEMBER_FILE).exists()


def lock_member(folder: Path, user: str = "another process", seconds: float = 0.0) -> AbstractContextManager[Any]:
    """Lock the member in ``folder`` until the end of the returned context.

    Args:
        folder: the member's folder.
        user: who may hold the lock, for the error line.
        seconds: time to wait for it; -1 for ever.

    Raises:
        UserError: another process trains the member or changes its artifact.
    """
    lock = folder / ".lock"
    try:
        return locked(lock, seconds)
    except Timeout:
        raise UserError(
            f"{lock}: {folder.name} is in use by {user}; wait for it or stop it, or remove this file if its "
            "machine is dead"
        ) from None


def break_mark(folder: Path) -> None:
    """Remove the mark that another host has left on a disk that cannot lock; call it with the member's lease."""
    lock = folder / ".lock"
    if lock.exists() and (mark := lock.read_text(encoding="utf-8")) and platform.node() not in mark:
        lock.unlink()


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Load an experiment as its run folder records it; as ``path`` says if there is no record.

    The sections ``island``, ``sample`` and ``evaluate`` of ``path``, and ``overrides``, win over the record. ``path``
    may be a record itself, also of a folder that has moved.

    Raises:
        UserError: as ``load_experiment``.
    """
    path = Path(path)
    experiment = load_experiment(path, overrides)
    run = RunFolder.of(experiment)
    if run.experiment.exists() and run.experiment.resolve() != path.resolve():
        recorded = load_experiment(path, overrides, record=run.experiment)
        experiment = replace(recorded, run_dir=experiment.run_dir)  # the folder may have moved

    return experiment


def load_recorded(place: str, overrides: Sequence[str]) -> Experiment | None:
    """Load the experiment of a file or of a run folder; None if ``place`` is neither.

    Raises:
        UserError: as ``load_run`` or ``refuse_changed``.
    """
    path = Path(place)
    if remote.is_url(place):
        return None
    if path.is_dir():
        path = RunFolder(path).experiment
        if not path.exists():
            return None

    experiment = load_run(path, overrides)
    refuse_changed(experiment)
    return experiment


def refuse_changed(experiment: Experiment) -> None:
    """Check that the experiment's run folder, if any, was made by the same experiment.

    Raises:
        UserError: a different experiment made it; the line names the changed keys.
    """
    run = RunFolder.of(experiment)
    # Without members the folder is only prepared, and prepare knows which of its stages a changed key affects.
    if run.experiment.exists() and (run.root / "members").exists():
        refuse_changes(run.experiment, recorded(run), asdict(experiment))


def refuse_unprepared(experiment: Experiment) -> None:
    """Check that what a run folder holds was prepared as the experiment says; nothing if it has no record of that.

    Raises:
        UserError: naming the keys that changed since.
    """
    if changed := changed_since_prepared(experiment):
        raise UserError(
            f"{RunFolder.of(experiment).experiment}: the shards were prepared with other settings: {changed}; repeat "
            "prepare, or set them back"
        )


def changed_since_prepared(experiment: Experiment) -> str:
    """Describe ``changes`` of what the run folder was prepared with; empty if it has no record of that."""
    now = asdict(experiment)
    before = recorded(RunFolder.of(experiment))
    prepared = {key: before[key] for key in before.keys() & {"prepare", "seed"}}
    return changes({**now, **prepared}, now)


def recorded(run: RunFolder) -> dict[str, Any]:
    """The experiment recorded in the folder; empty if there is none."""
    return dict(OmegaConf.to_container(read_yaml(run.experiment))) if run.experiment.exists() else {}  # type: ignore[arg-type]


def refuse_changes(path: Path | str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Check that two experiments are the same but for ``changes`` that are allowed.

    Args:
        path: records the old experiment; named in the error line.
        old: may lack keys that are newer than it.
        new: the experiment of this start.

    Raises:
        UserError: naming the changed keys.
    """
    if changed := changes(old, new):
        raise UserError(
            f"{path}: the experiment changed since this was written: {changed}; set those keys back, or start "
            "another run with run_dir=…, and remote=… if it has one"
        )


def changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Describe keys that differ between two experiments, except ``changeable_keys``; empty if none.

    Keys that are newer than ``old`` had their defaults; those that only an earlier release had do not count. More
    ``max_steps`` under a constant schedule are no change: a finished member can be trained on.
    """
    before, after, defaults = (
        dict(leaves(one, lists=False)) for one in (kept(old, Experiment), new, asdict(Experiment()))
    )
    allowed = tuple(f"{key}." for key in changeable_keys())
    described = []
    for key in sorted(before.keys() | after.keys()):
        inherited = None
        if key.endswith(".train.max_steps"):
            inherited = before.get("expert.train.max_steps")

        was = before.get(key, defaults.get(key, inherited))
        now = after.get(key)
        if was == now or f"{key}.".startswith(allowed):
            continue

        note = "was not set"
        if key in before:
            note = f"was {json.dumps(was)}"

        if key.endswith(".train.max_steps") and isinstance(was, int) and isinstance(now, int) and was < now:
            section = key.removesuffix("train.max_steps")
            # Of the section and its overrides; an expert without its own has the schedule of all.
            own = [one for name, one in after.items() if name.startswith(section) and name.endswith("train.schedule")]
            ends = {*(own or [after.get("expert.train.schedule")])} - {"constant"}
            if not ends:
                continue

            note += f", where the {min(ends)} schedule ends"

        described.append(f"{key} ({note})")

    return ", ".join(described)
