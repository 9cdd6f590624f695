"""What the members handed over, made one ensemble."""

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
from ddm_lightning.members.handover import described
from ddm_lightning.members.member import Member, ensemble_members
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import Manifest


def assemble(experiment: Experiment, run: RunFolder) -> bool:
    """Write ``ensemble.json`` over the artifacts of all members, which have to be finished.

    Returns:
        Whether it differs from what was there.

    Raises:
        UserError: artifacts that do not belong together, or damaged ones.
    """
    folders = [run.artifact(member) for member in ensemble_members(experiment)]
    listed = _listed(run)
    for folder in folders:
        meta = read_meta(folder)
        if listed.get(meta.member) != meta:  # once: weights are gigabytes
            check_weights(folder, meta)
    before = run.ensemble.read_bytes() if run.ensemble.exists() else None
    write_ensemble(run.root, folders, Manifest.read(run.root).priors)
    return run.ensemble.read_bytes() != before


def _listed(run: RunFolder) -> dict[str, ArtifactMeta]:
    """Members of the ensemble that is there; none where it is none, or is no longer what its artifacts are."""
    try:
        return read_ensemble(run.ensemble).metas
    except UserError:
        return {}


def refuse_stale(members: Sequence[str], experiment: Experiment, run: RunFolder) -> None:
    """A finished member is passed over; not one that is another's, or was not trained as the experiment says.

    One of fewer steps is trained on where its schedule is constant and it has a checkpoint.

    Raises:
        UserError: naming the artifact.
    """
    manifest = Manifest.read(run.root)
    for name in members:
        if not run.is_finished(name):
            continue
        folder, meta = run.artifact(name), read_meta(run.artifact(name))
        member = Member.resolve(name, experiment, manifest)
        steps = member.train.max_steps
        has_checkpoint = any((run.member(name) / "checkpoints").glob("step-*.ckpt"))
        goes_on = meta.step < steps and member.train.schedule == "constant" and has_checkpoint
        wanted = described(member, manifest)
        differing = [key for key, value in wanted.items() if getattr(meta, key) != value]
        if meta.member != name:
            problem = f"is the artifact of {meta.member}, not of {name}"
        elif "partition_sha256" in differing:
            problem = "was trained on clusters that have changed since, or on those of another run"
        elif meta.step != steps and not goes_on:
            problem = f"has {meta.step} steps of training, and the experiment asks for {steps}"
        elif meta.num_samples != meta.step * member.batch_size:
            samples = f"{steps * member.batch_size:,}"
            problem = f"was trained on {meta.num_samples:,} samples, and the experiment asks for {samples}"
        elif differing:
            was, now = getattr(meta, differing[0]), wanted[differing[0]]
            problem = f"has {differing[0]} = {was!r} in {MEMBER_FILE}, and the experiment asks for {now!r}"
        else:
            continue
        raise UserError(
            f"{folder}: {problem}; copy the right one there, remove {folder.parent} to train {name} anew, or use "
            "another folder with run_dir=…"
        )
