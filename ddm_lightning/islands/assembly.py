"""Check finished members and assemble their artifacts into one ensemble."""

from __future__ import annotations

from collections.abc import Sequence

from ddm_lightning.config import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.artifact import (
    MEMBER_FILE,
    ArtifactMeta,
    check_weights,
    read_ensemble,
    read_meta,
    write_ensemble,
)
from ddm_lightning.members.member import batch_size_of, config_of, ensemble_members
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import Manifest
from ddm_lightning.training.handover import described


def assemble(experiment: Experiment, run: RunFolder) -> bool:
    """Write ``ensemble.json`` for the artifacts of all members, which must be finished.

    Returns:
        Whether it differs from the previous file.

    Raises:
        UserError: an artifact is damaged, or the artifacts do not belong together.
    """
    folders = [run.artifact(member) for member in ensemble_members(experiment)]
    listed = _listed(run)
    for folder in folders:
        meta = read_meta(folder)
        if listed.get(meta.member) != meta:  # only once: weights are gigabytes
            check_weights(folder, meta)
    before = run.ensemble.read_bytes() if run.ensemble.exists() else None
    write_ensemble(run.root, folders, Manifest.read(run.root).priors)
    return run.ensemble.read_bytes() != before


def _listed(run: RunFolder) -> dict[str, ArtifactMeta]:
    """Members in the existing ``ensemble.json``; empty if it is missing or no longer fits its artifacts."""
    try:
        return read_ensemble(run.ensemble).metas
    except UserError:
        return {}


def refuse_stale(members: Sequence[str], experiment: Experiment, run: RunFolder) -> None:
    """Refuse finished members that do not fit the experiment; ``fit`` would skip them.

    A member with fewer steps may continue if its schedule is constant and it has a checkpoint.

    Raises:
        UserError: an artifact of another member, partition or setting.
    """
    manifest = Manifest.read(run.root)
    for member in members:
        if not run.is_finished(member):
            continue
        folder, meta = run.artifact(member), read_meta(run.artifact(member))
        train = config_of(member, experiment).train
        steps = train.max_steps
        has_checkpoint = any((run.member(member) / "checkpoints").glob("step-*.ckpt"))
        goes_on = meta.step < steps and train.schedule == "constant" and has_checkpoint
        wanted = described(member, experiment, manifest)
        differing = [key for key, value in wanted.items() if getattr(meta, key) != value]
        if meta.member != member:
            problem = f"is the artifact of {meta.member}, not of {member}"
        elif "partition_sha256" in differing:
            problem = "was trained on clusters that have changed since, or on those of another run"
        elif meta.step != steps and not goes_on:
            problem = f"has {meta.step} steps of training, and the experiment asks for {steps}"
        elif meta.num_samples != meta.step * batch_size_of(member, experiment):
            samples = steps * batch_size_of(member, experiment)
            problem = f"was trained on {meta.num_samples:,} samples, and the experiment asks for {samples:,}"
        elif differing:
            was, now = getattr(meta, differing[0]), wanted[differing[0]]
            problem = f"has {differing[0]} = {was!r} in {MEMBER_FILE}, and the experiment asks for {now!r}"
        else:
            continue
        raise UserError(
            f"{folder}: {problem}; copy the right one there, remove {folder.parent} to train {member} anew, or use "
            "another folder with run_dir=…"
        )
