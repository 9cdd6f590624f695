"""What a finished member hands over: its averaged weights, and what they are weights of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ddm_lightning.config import Experiment, to_dict
from ddm_lightning.members import artifact
from ddm_lightning.members.member import ROUTER, batch_size_of, config_of, member_condition, role_of
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import HELD_OUT_STEP, MemberStatus
from ddm_lightning.shards.manifest import Manifest


def is_finished(member: str, experiment: Experiment, run: RunFolder) -> bool:
    """Whether the member has handed over an artifact of all the steps that the experiment asks for.

    Raises:
        UserError: its description is damaged.
    """
    steps = config_of(member, experiment).train.max_steps
    return run.is_finished(member) and artifact.read_meta(run.artifact(member)).step >= steps


def described(member: str, experiment: Experiment, manifest: Manifest) -> dict[str, Any]:
    """The fields of ``ArtifactMeta`` that are known before the first step.

    An artifact that differs in one of them is not of this experiment.
    """
    config = to_dict(experiment)
    section = config["router" if member == ROUTER else "expert"]
    network = section["network"]
    return {
        "member": member,
        "role": role_of(member),
        "network": network["name"],
        "params": network["params"],
        "x_shape": manifest.x_shape,
        "condition": member_condition(member, experiment, manifest).to_dict(),
        "num_clusters": experiment.prepare.partition.num_clusters,
        "timestep_shift": section["timesteps"]["shift"],
        "image_encoder": config["prepare"]["image_encoder"],
        "normalisation": manifest.normalisation,
        "caption_encoder": config["prepare"]["caption_encoder"],
        "partition_sha256": manifest.partition_sha256,
    }


def hand_over(
    folder: Path,
    member: str,
    experiment: Experiment,
    manifest: Manifest,
    weights: Mapping[str, Tensor],
    prediction: str,
    status: MemberStatus,
) -> None:
    """Write the artifact of a member that has taken its last step.

    Args:
        folder: appears whole or not at all.
        member: its name.
        experiment: what it was trained for.
        manifest: of the shards that it was trained on.
        weights: averaged, on the CPU.
        prediction: what an expert's network predicts.
        status: of the training, with its figures.

    Raises:
        UserError: a weight is not finite.
    """
    metrics = dict(status.metrics)
    if status.validated_step:
        metrics[HELD_OUT_STEP] = float(status.validated_step)
    meta = artifact.ArtifactMeta(
        **described(member, experiment, manifest),
        prediction=None if member == ROUTER else prediction,
        step=status.step,
        num_samples=status.step * batch_size_of(member, experiment),
        metrics=metrics,
    )
    artifact.write_artifact(folder, weights, meta)
