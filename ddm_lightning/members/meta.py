"""``member.json``, the description of an artifact: untrusted, so every key is checked; without torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from ddm_lightning.config.experiment import LoraConfig, PluginConfig
from ddm_lightning.core import checks
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.flow.spec import PATH_NAMES, PREDICTIONS, ConditionSpec, shift_for
from ddm_lightning.members.roles import EXPERT, ROLES, expert_name, role_of
from ddm_lightning.members.run_folder import MEMBER_FILE
from ddm_lightning.members.status import CONDITIONAL, TEMPERATURE_METRIC

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
REMEDY = "fetch this artifact again from its island, or delete its folder and fit the member again"
"""Ends error lines about damaged artifacts."""
_ALONE = [name for name in ROLES if name != EXPERT]
MemberName: TypeAlias = Annotated[
    str,
    checks.matching(
        "|".join([rf"{EXPERT}-(0|[1-9]\d{{0,5}})", *_ALONE]),
        f"{expert_name(0)}, {expert_name(1)} …, or one of {', '.join(_ALONE)}",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ArtifactMeta:
    """Contents of ``member.json``; each field's annotation checks its JSON value."""

    format_version: Annotated[int, checks.version(FORMAT_VERSION)]
    """Version of this layout."""
    member: MemberName
    """``expert-0`` …, ``router``, ``monolith`` or ``student``."""
    role: Annotated[str, checks.one_of(ROLES)]
    """``expert``, ``router``, ``monolith`` or ``student``."""
    network: checks.Text
    """Name in the registry of experts (or of routers)."""
    params: dict[str, Any]
    """The network's parameters, plain JSON."""
    lora: LoraConfig | None = None
    """The network's adapters, which are then all that ``model.safetensors`` holds; None without. Their frozen base are
    the weights ``init_sha256``."""
    x_shape: checks.Shape3
    """Channels, height and width of ``x_0``; with buckets, of a square image of the same area."""
    buckets: tuple[Bucket, ...] = ()
    """Shapes of the training images; none if all have ``x_shape``."""
    condition: ConditionSpec
    """Kind and size of the network's condition."""
    condition_dropout: Annotated[float, checks.within(0, 1)] | None = None
    """Probability of dropping a sample's condition in training; guidance needs one above 0. None if not recorded."""
    num_clusters: checks.Size
    """K of the partition."""
    prediction: Annotated[str, checks.one_of(PREDICTIONS)] | None
    """Prediction type of the network (``PREDICTIONS``); None for a router."""
    path: Annotated[str, checks.one_of(PATH_NAMES)] = "linear"
    """Path on which the network was trained (``PATH_NAMES``)."""
    cluster: checks.Count | None = None
    """Cluster of an expert; None for other members."""
    interval: Annotated[tuple[float, float], checks.INTERVAL] = (0.0, 1.0)
    """Lowest and highest t that it was trained on, in times of the linear path."""
    timestep_shift: checks.Positive
    """Resolution shift of the training timesteps; sampling uses the experts'."""
    shift_by_tokens: bool = False
    """Whether the shift depends on a sample's shape; see ``shift_for``."""
    image_encoder: PluginConfig
    """The encoder of images to ``x_0``, and back."""
    normalisation: checks.Normalisation
    """``{"scale": …, "shift": …}``: x_0 = (stored - shift) · scale."""
    caption_encoder: PluginConfig | None
    """The encoder of prompts; None without text."""
    partition_sha256: checks.Sha256
    """SHA-256 of the partition that the member trained on."""
    clusters: list[checks.Text] = field(default_factory=list)
    """The cluster of each logit of an extended router (``cluster_of``); empty for those of the partition."""
    step: checks.Count
    """Optimizer steps taken."""
    max_steps: checks.Count = 0
    """Optimizer steps that were asked for: more than ``step`` if a callback ended the training. 0 if not recorded."""
    num_samples: checks.Count
    """Training samples, repetitions included."""
    init_from: checks.Text | None = None
    """Where the weights came from that its training started with; None if they were random."""
    init_sha256: checks.Sha256 | None = None
    """SHA-256 of their file."""
    metrics: dict[str, float]
    """Final figures such as the held-out loss; those of a router also hold its temperatures (``temperatures_of``)."""
    class_counts: list[checks.Count] = field(default_factory=list)
    """Images of each class in the member's clusters; empty for other conditions."""
    model_sha256: checks.Sha256 = ""
    """SHA-256 of ``model.safetensors``; set by ``write_artifact``."""

    def __post_init__(self) -> None:
        """Refuse fields that contradict each other.

        Raises:
            ValueError: some do.
        """
        role = role_of(self.member)
        counts = self.class_counts
        condition = self.condition
        if role.name != self.role:
            raise ValueError(f"key 'role' must be {role.name} for {self.member}, not {self.role}")
        if (self.cluster is None) != (role.name != EXPERT):
            raise ValueError("key 'cluster' must be a number for experts, null for others")
        if (self.cluster or 0) >= self.num_clusters:
            raise ValueError(f"key 'cluster' is {self.cluster}, but key 'num_clusters' is {self.num_clusters}")
        if (self.prediction is None) != role.classifies:
            raise ValueError("key 'prediction' must be null for a router and only there")
        if self.clusters and not (role.classifies and len(self.clusters) == self.num_clusters):
            raise ValueError("key 'clusters' must name num_clusters clusters of a router")
        if self.lora is not None and (self.init_sha256 is None or role.classifies):
            raise ValueError("key 'lora' needs key 'init_sha256', and is not for a router")
        if max(condition.size * max(condition.length, 1), condition.vector_size) > 1 << 24:
            raise ValueError("key 'condition' has more than 2^24 numbers")
        if counts and (condition.kind != "class" or len(counts) != condition.size or not any(counts)):
            raise ValueError("key 'class_counts' must count the images of every class of key 'condition'")
        if any(value <= 0 for key, value in self.metrics.items() if key.startswith(TEMPERATURE_METRIC)):
            raise ValueError("key 'metrics' holds a temperature that is not positive")

    @property
    def asked_steps(self) -> int:
        """Optimizer steps of the training that it completes, which may have ended early."""
        return max(self.step, self.max_steps)

    def shift_for(self, shape: Sequence[int]) -> float:
        """Shift of the times of samples whose shape ends with height and width."""
        return shift_for(shape, self.x_shape, self.timestep_shift, self.shift_by_tokens)

    @property
    def base_sha256(self) -> str | None:
        """SHA-256 of the frozen base under the adapters; None without."""
        if self.lora is None:
            return None

        return self.init_sha256


def read_meta(folder: Path) -> ArtifactMeta:
    """Read and check ``member.json`` alone.

    Raises:
        UserError: it is missing or not JSON, has a wrong, missing or unknown key, or another format version.
    """
    return checks.read_record(folder / MEMBER_FILE, ArtifactMeta, "the artifact's description", REMEDY)


def base_file(root: Path, meta: ArtifactMeta) -> Path:
    """Path of the base of an artifact's adapters in the folder of a run or saved ensemble."""
    return root / "initial" / str(meta.base_sha256) / WEIGHTS_FILE


def temperatures_of(meta: ArtifactMeta) -> tuple[list[float], list[float]]:
    """Temperatures of a router's logits without and with a condition, by equal parts of t; empty if not calibrated."""
    return _by_time(meta, TEMPERATURE_METRIC), _by_time(meta, TEMPERATURE_METRIC + CONDITIONAL)


def _by_time(meta: ArtifactMeta, prefix: str) -> list[float]:
    return [value for key, value in sorted(meta.metrics.items()) if re.fullmatch(rf"{prefix}_t[\d.]+", key)]
