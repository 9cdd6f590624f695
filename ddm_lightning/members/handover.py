"""Hand-over: the artifact of a finished member, and whether there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ddm_lightning.members import artifact
from ddm_lightning.members.member import ROUTER, Member
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import HELD_OUT_STEP, MemberStatus
from ddm_lightning.shards.manifest import Manifest


def is_finished(name: str, max_steps: int, run: RunFolder) -> bool:
    """Whether member ``name`` has handed over an artifact of at least ``max_steps`` steps.

    Raises:
        UserError: its description is damaged.
    """
    return run.is_finished(name) and artifact.read_meta(run.artifact(name)).step >= max_steps


def described(member: Member, manifest: Manifest) -> dict[str, Any]:
    """Fields of ``ArtifactMeta`` known before the first step; an artifact that differs is another experiment's."""
    return {
        "member": member.name,
        "role": member.role,
        "network": member.network.name,
        "params": member.network.params,
        "x_shape": member.x_shape,
        "condition": member.condition.to_dict(),
        "num_clusters": member.num_clusters,
        "timestep_shift": member.timesteps.shift,
        "image_encoder": asdict(member.image_encoder),
        "normalisation": manifest.normalisation,
        "caption_encoder": None if member.caption_encoder is None else asdict(member.caption_encoder),
        "partition_sha256": manifest.partition_sha256,
    }


def hand_over(
    folder: Path,
    member: Member,
    manifest: Manifest,
    weights: Mapping[str, Tensor],
    prediction: str,
    status: MemberStatus,
) -> None:
    """Write the artifact of a member after its last step.

    Args:
        folder: appears whole or not at all.
        member: the finished member.
        manifest: describes the shards it was trained on.
        weights: averaged, on the CPU.
        prediction: what an expert's network predicts.
        status: its training, with figures.

    Raises:
        UserError: a weight is not finite.
    """
    metrics = dict(status.metrics)
    if status.validated_step:
        metrics[HELD_OUT_STEP] = float(status.validated_step)
    meta = artifact.ArtifactMeta(
        **described(member, manifest),
        prediction=None if member.role == ROUTER else prediction,
        step=status.step,
        num_samples=status.step * member.batch_size,
        metrics=metrics,
    )
    artifact.write_artifact(folder, weights, meta)
