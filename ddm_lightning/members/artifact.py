"""Artifacts: what an island hands over, a folder with ``model.safetensors`` and ``member.json``.

An expert with adapters hands over these alone. The base on which all of them are trained is one file,
``initial/SHA256/model.safetensors``, in the folder of the run or the saved ensemble.

Artifacts are untrusted: the weights must have the recorded SHA-256 and are never unpickled, and every key of the JSON
is checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from ddm_lightning.core import checks, remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_folder, atomic_write_json
from ddm_lightning.core.weights import load_weights, save_weights
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.flow.path import PATHS, PREDICTIONS
from ddm_lightning.members.member import EXPERT, ROLES, Member, expert_name, expert_number, role_of
from ddm_lightning.members.run_folder import MEMBER_FILE, read_record
from ddm_lightning.members.status import CONDITIONAL, HELD_OUT_STEP, TEMPERATURE, MemberStatus
from ddm_lightning.shards.manifest import Manifest

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
REMEDY = "fetch this artifact again from its island, or delete its folder and fit the member again"
"""Ends error lines about damaged artifacts."""
VERSION: checks.Check = (
    lambda value: checks.is_int(value, 1) and value == FORMAT_VERSION,
    f"{FORMAT_VERSION} (for another, install the release of ddm_lightning that wrote it)",
)
_ALONE = [name for name in ROLES if name != EXPERT]
MEMBER: checks.Check = checks.matching(
    "|".join([rf"{EXPERT}-(0|[1-9]\d{{0,5}})", *_ALONE]),
    f"{expert_name(0)}, {expert_name(1)} …, {', '.join(_ALONE[:-1])} or {_ALONE[-1]}",
)
"""Check for a member's name."""
_LORA = {
    "rank": checks.integer(1),
    "alpha": checks.optional(checks.POSITIVE),
    "target_modules": checks.list_of(checks.ANY_TEXT),
}


def _is_condition(value: Any) -> bool:
    try:
        spec = ConditionSpec(**value)
        vector = [max(spec.vector_size, 1)]
        return checks.is_shape([max(spec.size, 1), max(spec.length, 1)], 2) and checks.is_shape(vector, 1)
    except (ValueError, TypeError, AttributeError):  # the last for anything but an object
        return False


@dataclass(frozen=True, kw_only=True)
class ArtifactMeta:
    """Contents of ``member.json``; each field's annotation checks its JSON value."""

    format_version: Annotated[int, VERSION] = FORMAT_VERSION
    """Version of this layout."""
    member: Annotated[str, MEMBER]
    """``expert-0`` …, ``router``, ``monolith`` or ``student``."""
    role: Annotated[str, checks.one_of(tuple(ROLES))]
    """``expert``, ``router``, ``monolith`` or ``student``."""
    network: Annotated[str, checks.TEXT]
    """Name in the registry of experts (or of routers)."""
    params: Annotated[dict[str, Any], checks.OBJECT]
    """The network's parameters, plain JSON."""
    lora: Annotated[dict[str, Any] | None, checks.optional(checks.object_of(_LORA))] = None
    """The network's adapters (``LoraConfig``), which are then all that ``model.safetensors`` holds; None without. Their
    frozen base are the weights ``init_sha256``."""
    x_shape: Annotated[tuple[int, int, int], checks.X_SHAPE]
    """Channels, height and width of ``x_0``."""
    condition: Annotated[dict[str, Any], (_is_condition, "an object of a condition's kind and size")]
    """``ConditionSpec.to_dict()`` of the network."""
    num_clusters: Annotated[int, checks.integer(1)]
    """K of the partition."""
    prediction: Annotated[str | None, checks.optional(checks.one_of(PREDICTIONS))]
    """Prediction type of the network (``PREDICTIONS``); None for a router."""
    path: Annotated[str, checks.one_of(tuple(PATHS))] = "linear"
    """Path on which the network was trained (``PATHS``)."""
    cluster: Annotated[int | None, checks.optional(checks.integer(0))] = None
    """Cluster of an expert, its number if not given; None for other members."""
    interval: Annotated[list[float], checks.INTERVAL] = field(default_factory=lambda: [0.0, 1.0])
    """Lowest and highest t that it was trained on, in times of the linear path."""
    timestep_shift: Annotated[float, checks.POSITIVE]
    """Resolution shift of the training timesteps; sampling uses the experts'."""
    image_encoder: Annotated[dict[str, Any], checks.PLUGIN]
    """``{"name": …, "params": …}`` of the encoder of images to ``x_0``, and back."""
    normalisation: Annotated[dict[str, float | list[float]], checks.NORMALISATION]
    """``{"scale": …, "shift": …}``: x_0 = (stored - shift) · scale."""
    caption_encoder: Annotated[dict[str, Any] | None, checks.optional(checks.PLUGIN)]
    """``{"name": …, "params": …}`` of the encoder of prompts; None without text."""
    partition_sha256: Annotated[str, checks.SHA256]
    """SHA-256 of the partition that the member trained on."""
    clusters: Annotated[list[str], checks.list_of(checks.TEXT)] = field(default_factory=list)
    """The cluster of each logit of an extended router (``cluster_of``); empty for those of the partition."""
    step: Annotated[int, checks.integer(0)]
    """Optimizer steps taken."""
    num_samples: Annotated[int, checks.integer(0)]
    """Training samples, repetitions included."""
    init_from: Annotated[str | None, checks.optional(checks.TEXT)] = None
    """Where the weights came from that its training started with; None if they were random."""
    init_sha256: Annotated[str | None, checks.optional(checks.SHA256)] = None
    """SHA-256 of their file."""
    metrics: Annotated[dict[str, float], checks.NUMBERS]
    """Final figures such as the held-out loss; those of a router also hold its temperatures (``temperatures_of``)."""
    class_counts: Annotated[list[int], checks.list_of(checks.integer(0))] = field(default_factory=list)
    """Images of each class in the member's clusters; empty for other conditions."""
    model_sha256: Annotated[str, checks.SHA256] = ""
    """SHA-256 of ``model.safetensors``; set by ``write_artifact``."""

    def __post_init__(self) -> None:
        if self.role == EXPERT and self.cluster is None:
            object.__setattr__(self, "cluster", expert_number(self.member))

    @property
    def base_sha256(self) -> str | None:
        """SHA-256 of the frozen base under the adapters; None without."""
        return None if self.lora is None else self.init_sha256


_CHECKS = checks.field_checks(ArtifactMeta)


def _contradiction(document: Mapping[str, Any]) -> str | None:
    """Describe fields of a ``member.json`` that contradict each other."""
    role, num_clusters, cluster = role_of(document["member"]), document["num_clusters"], document["cluster"]
    counts, condition = document["class_counts"], document["condition"]
    temperatures = (value for key, value in document["metrics"].items() if key.startswith(TEMPERATURE))
    rules = (
        (
            role.name != document["role"],
            f"key 'role' must be {role.name} for {document['member']}, not {document['role']}",
        ),
        (
            (cluster or 0) >= num_clusters,
            f"key 'cluster' is {cluster}, but key 'num_clusters' is {num_clusters}",
        ),
        ((cluster is None) != (role.name != EXPERT), "key 'cluster' must be a number for experts, null for others"),
        (
            (document["prediction"] is None) != role.classifies,
            "key 'prediction' must be null for a router and only there",
        ),
        (
            document["clusters"] and not (role.classifies and len(document["clusters"]) == num_clusters),
            "key 'clusters' must name num_clusters clusters of a router",
        ),
        (
            document["lora"] is not None and (document["init_sha256"] is None or role.classifies),
            "key 'lora' needs key 'init_sha256', and is not for a router",
        ),
        (
            counts and (condition["kind"] != "class" or len(counts) != condition["size"] or not any(counts)),
            "key 'class_counts' must count the images of every class of key 'condition'",
        ),
        (any(value <= 0 for value in temperatures), "key 'metrics' holds a temperature that is not positive"),
    )
    return next((problem for is_wrong, problem in rules if is_wrong), None)


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
        UserError: a weight is not finite.
        ValueError: ``read_artifact`` would refuse ``meta``.
    """
    with atomic_folder(folder) as temporary:
        meta = replace(meta, model_sha256=save_weights(temporary / WEIGHTS_FILE, state_dict, str(folder)))
        document = {**asdict(meta), "x_shape": list(meta.x_shape)}
        if problem := checks.problem_with(document, _CHECKS) or _contradiction(document):
            raise ValueError(problem)
        atomic_write_json(temporary / MEMBER_FILE, document)
        if sign is not None:
            sign(temporary)
    return meta


def read_meta(folder: Path) -> ArtifactMeta:
    """Read and check ``member.json`` alone.

    Raises:
        UserError: it is missing or not JSON, has a wrong, missing or unknown key, or another format version.
    """
    path = folder / MEMBER_FILE
    document = read_record(path, _CHECKS, "the artifact's description", REMEDY)
    if problem := _contradiction(document):
        raise UserError(f"{path}: {problem}; {REMEDY}")
    return ArtifactMeta(**{**document, "x_shape": tuple(document["x_shape"])})


def read_artifact(folder: Path) -> tuple[ArtifactMeta, dict[str, Tensor]]:
    """Read and check an artifact.

    Returns:
        Its description, and its weights on the CPU.

    Raises:
        UserError: as ``read_meta``; or the weights are missing, pickled, damaged, not the recorded ones or not finite.
    """
    meta = read_meta(folder)
    return meta, load_weights(folder / WEIGHTS_FILE, meta.model_sha256, REMEDY)


def base_file(root: Path, meta: ArtifactMeta) -> Path:
    """Path of the base of an artifact's adapters in the folder of a run or saved ensemble."""
    return root / "initial" / str(meta.base_sha256) / WEIGHTS_FILE


def temperatures_of(meta: ArtifactMeta) -> tuple[list[float], list[float]]:
    """Temperatures of a router's logits without and with a condition, by equal parts of t; empty if not calibrated."""
    found = []
    for prefix in (TEMPERATURE, TEMPERATURE + CONDITIONAL):
        by_time = {key: value for key, value in meta.metrics.items() if re.fullmatch(rf"{prefix}_t[\d.]+", key)}
        found.append([by_time[key] for key in sorted(by_time)])
    return found[0], found[1]


def described(member: Member, manifest: Manifest) -> dict[str, Any]:
    """Fields of ``ArtifactMeta`` known before the first step; an artifact that differs is another experiment's."""
    return {
        "member": member.name,
        "role": member.role.name,
        "network": member.network.name,
        "params": member.network.params,
        "lora": member.lora and asdict(member.lora),
        "x_shape": member.x_shape,
        "condition": member.condition.to_dict(),
        "num_clusters": member.num_clusters,
        "path": member.path,
        "cluster": member.clusters[0] if member.role.name == EXPERT else None,
        "interval": list(member.interval),
        "timestep_shift": member.timesteps.shift,
        "image_encoder": asdict(member.image_encoder),
        "normalisation": manifest.normalisation,
        "caption_encoder": None if member.caption_encoder is None else asdict(member.caption_encoder),
        "partition_sha256": manifest.partition_sha256,
        "init_from": member.init_from and remote.shown(member.init_from.source),
    }


def hand_over(
    folder: Path,
    member: Member,
    manifest: Manifest,
    weights: Mapping[str, Tensor],
    prediction: str,
    status: MemberStatus,
    sign: Callable[[Path], None] | None = None,
    init_sha256: str | None = None,
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
        init_sha256: SHA-256 of the weights that it started from.

    Raises:
        UserError: a weight is not finite.
    """
    validated = {HELD_OUT_STEP: float(status.validated_step)} if status.validated_step else {}
    class_counts: list[int] = []
    if member.condition.kind == "class" and manifest.class_counts:
        counts = (manifest.class_counts[k] for k in member.clusters)
        class_counts = [sum(of_class) for of_class in zip(*counts, strict=True)]
    meta = ArtifactMeta(
        **described(member, manifest),
        prediction=None if member.role.classifies else prediction,
        init_sha256=init_sha256,
        step=status.step,
        num_samples=status.step * member.batch_size,
        metrics={**status.metrics, **validated},
        class_counts=class_counts,
    )
    write_artifact(folder, weights, meta, sign)
