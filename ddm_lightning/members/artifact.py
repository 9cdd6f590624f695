"""Artifacts: what an island hands over, a folder with ``model.safetensors`` and ``member.json``.

An expert with adapters hands over these alone. The base on which all of them are trained is one file,
``initial/SHA256/model.safetensors``, in the folder of the run or the saved ensemble.

Artifacts are untrusted: the weights must have the recorded SHA-256 and are never unpickled, and every key of the JSON
is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ddm_lightning.core import checks
from ddm_lightning.core.errors import redacted
from ddm_lightning.core.files import atomic_folder, atomic_write_json
from ddm_lightning.core.weights import load_weights, save_weights
from ddm_lightning.members.member import Member
from ddm_lightning.members.meta import FORMAT_VERSION, REMEDY, WEIGHTS_FILE, ArtifactMeta, read_meta
from ddm_lightning.members.roles import EXPERT
from ddm_lightning.members.run_folder import MEMBER_FILE
from ddm_lightning.members.status import HELD_OUT_STEP, MemberStatus
from ddm_lightning.shards.manifest import Manifest


def write_artifact(
    folder: Path, state_dict: Mapping[str, Tensor], meta: ArtifactMeta, sign: Callable[[Path], None] | None = None
) -> ArtifactMeta:
    """Write ``model.safetensors`` and ``member.json``; ``folder`` appears whole or not at all.

    Args:
        folder: the artifact.
        state_dict: its weights by name.
        meta: its description.
        sign: adds a signature to the folder it is called with.

    Returns:
        ``meta`` with the hash of the written weights.

    Raises:
        UserError: a weight is not finite, or ``read_artifact`` would refuse ``meta``.
    """
    with atomic_folder(folder) as temporary:
        meta = replace(meta, model_sha256=save_weights(temporary / WEIGHTS_FILE, state_dict, str(folder)))
        document = asdict(meta)
        checks.record(document, ArtifactMeta, str(folder), REMEDY)
        atomic_write_json(temporary / MEMBER_FILE, document)
        if sign is not None:
            sign(temporary)

    return meta


def read_artifact(folder: Path) -> tuple[ArtifactMeta, dict[str, Tensor]]:
    """Read and check an artifact.

    Returns:
        Its description, and its weights on the CPU.

    Raises:
        UserError: as ``read_meta``; or the weights are missing, pickled, damaged, not the recorded ones or not finite.
    """
    meta = read_meta(folder)
    return meta, load_weights(folder / WEIGHTS_FILE, meta.model_sha256, REMEDY)


def described(member: Member, manifest: Manifest) -> dict[str, Any]:
    """Fields of ``ArtifactMeta`` known before the first step; an artifact that differs is another experiment's."""
    return {
        "member": member.name,
        "role": member.role.name,
        "network": member.network.name,
        "params": member.network.params,
        "lora": member.lora,
        "x_shape": member.x_shape,
        "buckets": member.buckets,
        "condition": member.condition,
        "num_clusters": member.num_clusters,
        "path": member.path,
        "cluster": member.clusters[0] if member.role.name == EXPERT else None,
        "interval": member.interval,
        "timestep_shift": member.timesteps.shift,
        "shift_by_tokens": member.timesteps.shift_by_tokens,
        "image_encoder": member.image_encoder,
        "normalisation": manifest.normalisation,
        "caption_encoder": member.caption_encoder,
        "partition_sha256": manifest.partition_sha256,
        "init_from": member.init_from and redacted(member.init_from.source),
    }


def hand_over(
    folder: Path,
    member: Member,
    manifest: Manifest,
    weights: Mapping[str, Tensor],
    prediction: str,
    status: MemberStatus,
    sign: Callable[[Path], None] | None = None,
) -> None:
    """Write the artifact of a member after its last step.

    Args:
        folder: appears whole or not at all.
        member: the finished member.
        manifest: describes the shards it trained on.
        weights: averaged weights on the CPU.
        prediction: prediction type of an expert's network.
        status: steps and figures of the training.
        sign: as in ``write_artifact``.

    Raises:
        UserError: a weight is not finite.
    """
    metrics = {**status.metrics}
    if status.validated_step:
        metrics[HELD_OUT_STEP] = float(status.validated_step)

    class_counts: list[int] = []
    if member.condition.kind == "class" and manifest.class_counts:
        class_counts = np.sum([manifest.class_counts[k] for k in member.clusters], axis=0).tolist()

    meta = ArtifactMeta(
        format_version=FORMAT_VERSION,
        **described(member, manifest),
        condition_dropout=member.condition_dropout,
        prediction=None if member.role.classifies else prediction,
        init_sha256=member.initial.sha256 if member.initial else None,
        step=status.step,
        max_steps=status.max_steps,
        num_samples=status.step * member.batch_size,
        metrics=metrics,
        class_counts=class_counts,
    )
    write_artifact(folder, weights, meta, sign)
