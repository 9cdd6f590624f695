"""What the members handed over, made one ensemble."""

from __future__ import annotations

from collections.abc import Sequence

from ddm_lightning.artifacts import read_meta, write_ensemble
from ddm_lightning.config import Experiment
from ddm_lightning.errors import UserError
from ddm_lightning.members import config_of, ensemble_members
from ddm_lightning.prepare.manifest import Manifest
from ddm_lightning.run_folder import RunFolder


def assemble(experiment: Experiment, run: RunFolder) -> bool:
    """Write ``ensemble.json`` over the artifacts of all members, which have to be finished.

    Returns:
        Whether it differs from what was there.

    Raises:
        UserError: artifacts that do not belong together, or damaged ones.
    """
    folders = [run.artifact(member) for member in ensemble_members(experiment)]
    before = run.ensemble.read_bytes() if run.ensemble.exists() else None
    write_ensemble(run.root, folders, Manifest.read(run.root).priors)
    return run.ensemble.read_bytes() != before


def refuse_stale(members: Sequence[str], experiment: Experiment, run: RunFolder) -> None:
    """A finished member is passed over; not one that is another's, or was not trained as the experiment says.

    Raises:
        UserError: naming the artifact.
    """
    wanted = Manifest.read(run.root).partition_sha256
    for member in members:
        if not run.is_finished(member):
            continue
        folder, meta = run.artifact(member), read_meta(run.artifact(member))
        steps = config_of(member, experiment).train.max_steps
        if meta.member != member:
            problem = f"is the artifact of {meta.member}, not of {member}"
        elif meta.partition_sha256 != wanted:
            problem = "was trained on clusters that have changed since, or on those of another run"
        elif meta.step != steps:
            problem = f"has {meta.step} steps of training, and the experiment asks for {steps}"
        else:
            continue
        raise UserError(
            f"{folder}: {problem}; copy the right one there, remove {folder.parent} to train {member} anew, or use "
            "another folder with run_dir=…"
        )
