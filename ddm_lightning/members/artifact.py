"""What an island hands over: a folder with ``model.safetensors`` and ``member.json``, and no code.

Whoever reads an artifact trusts none of it: the weights must have the recorded SHA-256 and are never
unpickled, every key of the JSON is checked, and networks are found by name among what is installed here.
``ensemble.json`` lists the artifacts that make one ensemble; its paths may not leave its own folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_folder, atomic_write_json, inside, read_json, sha256_file
from ddm_lightning.core.weights import check_memory, check_recorded, load_weights, read_header, save_weights
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.flow.path import PREDICTIONS
from ddm_lightning.networks import EXPERTS, ROUTERS

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
MEMBER_FILE = "member.json"
ENSEMBLE_FILE = "ensemble.json"
ROLES = ("expert", "router", "monolith")


_REMEDY = "fetch this artifact again from its island, or fit the member again"


def _is_condition(value: Any) -> bool:
    try:
        spec = ConditionSpec.from_dict(value)
        return checks.is_shape([max(spec.size, 1), max(spec.length, 1)], 2)
    except (ValueError, TypeError):
        return False


_SHARED_BY_ALL = ("partition_sha256", "num_clusters", "x_shape", "image_encoder", "normalisation")
# The router draws its own timesteps and may see no condition.
_SHARED_BY_EXPERTS = ("condition", "caption_encoder", "timestep_shift")
_WORDS = {"partition_sha256": "partition", "num_clusters": "number of clusters"}

_MEMBER_CHECKS: dict[str, checks.Check] = {
    "format_version": checks.integer(FORMAT_VERSION),
    "member": checks.matching(r"expert-(0|[1-9]\d{0,5})|router|monolith", "expert-0, expert-1 …, router or monolith"),
    "role": checks.one_of(ROLES),
    "network": checks.TEXT,
    "params": checks.OBJECT,
    "x_shape": checks.X_SHAPE,
    "condition": (_is_condition, "an object of a condition's kind and size"),
    "num_clusters": checks.integer(1),
    "prediction": checks.optional(checks.one_of(PREDICTIONS)),
    "timestep_shift": checks.POSITIVE,
    "image_encoder": checks.PLUGIN,
    "normalisation": checks.NORMALISATION,
    "caption_encoder": checks.optional(checks.PLUGIN),
    "partition_sha256": checks.SHA256,
    "step": checks.integer(0),
    "num_samples": checks.integer(0),
    "metrics": checks.NUMBERS,
    "model_sha256": checks.SHA256,
}

_ENSEMBLE_CHECKS: dict[str, checks.Check] = {
    "format_version": checks.integer(FORMAT_VERSION),
    "num_clusters": checks.integer(1),
    "priors": checks.SHARES,
    "partition_sha256": checks.SHA256,
    "members": checks.LIST,
}

_ENTRY_CHECKS: dict[str, checks.Check] = {
    "member": _MEMBER_CHECKS["member"],
    "path": checks.TEXT,
    "member_json_sha256": checks.SHA256,
}


@dataclass(frozen=True)
class ArtifactMeta:
    """Everything that ``member.json`` says about the weights beside it."""

    member: str
    """``expert-0`` … ``expert-{K-1}``, ``router`` or ``monolith``."""
    role: str
    """``expert``, ``router`` or ``monolith``."""
    network: str
    """Name in the registry of experts (or of routers)."""
    params: dict[str, Any]
    """The network's parameters, plain JSON."""
    x_shape: tuple[int, int, int]
    """Channels, height and width of x_0."""
    condition: dict[str, Any]
    """``ConditionSpec.to_dict()`` of the network."""
    num_clusters: int
    """K of the partition."""
    prediction: str | None
    """What the network predicts (``PREDICTIONS``); None for a router."""
    timestep_shift: float
    """Resolution shift of the training timesteps; sampling uses the experts'."""
    image_encoder: dict[str, Any]
    """``{"name": …, "params": …}`` of what made x_0 from pictures, and decodes it."""
    normalisation: dict[str, float | list[float]]
    """``{"scale": …, "shift": …}``: x_0 = (stored - shift) · scale."""
    caption_encoder: dict[str, Any] | None
    """``{"name": …, "params": …}`` of what made text vectors from prompts; None without text."""
    partition_sha256: str
    """SHA-256 of the partition that the member trained on."""
    step: int
    """Optimizer steps behind the weights."""
    num_samples: int
    """Samples that the member was trained on, repetitions counted."""
    metrics: dict[str, float]
    """Final figures such as the validation loss."""
    model_sha256: str = ""
    """SHA-256 of ``model.safetensors``; ``write_artifact`` fills it in."""
    format_version: int = FORMAT_VERSION
    """Version of this layout."""


@dataclass(frozen=True)
class EnsembleManifest:
    """A checked ``ensemble.json``."""

    priors: tuple[float, ...]
    """Share of the data in each cluster, [K], summing to 1."""
    partition_sha256: str
    """The partition that all members share."""
    folders: dict[str, Path]
    """Member to artifact folder: all experts in order, then the router if there is one."""
    metas: dict[str, ArtifactMeta]
    """Member to its ``member.json``, in the same order."""


def write_artifact(folder: Path, state_dict: Mapping[str, Tensor], meta: ArtifactMeta) -> ArtifactMeta:
    """Write ``model.safetensors`` and ``member.json``; ``folder`` appears whole or not at all.

    Returns:
        ``meta`` with the hash of the written weights.

    Raises:
        UserError: a weight is not finite.
        ValueError: ``meta`` holds something that ``read_artifact`` would refuse.
    """
    with atomic_folder(folder) as temporary:
        meta = replace(meta, model_sha256=save_weights(temporary / WEIGHTS_FILE, state_dict, str(folder)))
        document = _to_json(meta)
        problem = _member_problem(document)
        if problem is not None:
            raise ValueError(problem)
        atomic_write_json(temporary / MEMBER_FILE, document)
    return meta


def read_meta(folder: Path) -> ArtifactMeta:
    """Read and check ``member.json`` alone.

    Raises:
        UserError: missing, no JSON, a missing, unknown or wrong key, or another format version.
    """
    path = folder / MEMBER_FILE
    document = read_json(path, "the artifact's description", _REMEDY)
    _refuse_other_version(path, document)
    problem = _member_problem(document)
    if problem is not None:
        raise UserError(f"{path}: {problem}; {_REMEDY}")
    return ArtifactMeta(**{**document, "x_shape": tuple(document["x_shape"])})


def read_artifact(folder: Path) -> tuple[ArtifactMeta, dict[str, Tensor]]:
    """Read and check an artifact.

    Returns:
        Its description, and its weights on the CPU.

    Raises:
        UserError: anything wrong with ``member.json`` (see ``read_meta``), or weights that are missing,
            pickled, not the recorded ones, damaged or not finite.
    """
    meta = read_meta(folder)
    return meta, load_weights(folder / WEIGHTS_FILE, meta.model_sha256, _REMEDY)


def check_weights(folder: Path, meta: ArtifactMeta) -> None:
    """Look whether the weights of an artifact are those that ``meta`` describes, without reading them as such.

    Raises:
        UserError: missing, pickled or not the recorded ones.
    """
    check_recorded(folder / WEIGHTS_FILE, meta.model_sha256, _REMEDY)


def load_network(folder: Path) -> tuple[ArtifactMeta, nn.Module]:
    """Read an artifact's description and build its network, in evaluation mode on the CPU.

    The network is compared with the header of the weights before they are read.

    Raises:
        UserError: as ``read_artifact`` and ``build_network``.
    """
    meta, path = read_meta(folder), folder / WEIGHTS_FILE
    network = _fitting_network(meta, read_header(path, _REMEDY), str(folder / MEMBER_FILE))
    network.load_state_dict(load_weights(path, meta.model_sha256, _REMEDY), strict=True)
    return meta, network.eval()


def build_network(meta: ArtifactMeta, state: Mapping[str, Tensor], named_by: Path | None = None) -> nn.Module:
    """The network that ``meta`` names, with the weights ``state``, in evaluation mode on the CPU.

    Args:
        meta: the artifact's description.
        state: the artifact's weights.
        named_by: the file to blame in error lines; the member's name stands in for it.

    Raises:
        UserError: unknown network name, parameters that it refuses, weights that do not fit it or the memory, or a
            prediction other than the one recorded.
    """
    network = _fitting_network(meta, state, str(named_by or meta.member))
    network.load_state_dict(dict(state), strict=True)
    return network.eval()


def _fitting_network(meta: ArtifactMeta, weights: Mapping[str, Tensor], source: str) -> nn.Module:
    """The untrained network that ``meta`` names, if it has the names, shapes and types of ``weights``."""
    registry = ROUTERS if meta.role == "router" else EXPERTS
    context: dict[str, Any] = {"x_shape": meta.x_shape, "condition": ConditionSpec.from_dict(meta.condition)}
    if meta.role == "router":
        context["num_clusters"] = meta.num_clusters
    if meta.network not in registry.names():
        raise UserError(
            f"{source}: unknown {registry.kind} {meta.network!r}; install the package that offers it "
            f"(known here: {', '.join(registry.names())})"
        )

    make = partial(registry.build, meta.network, meta.params, **context)
    release = f"use the release of {meta.network!r} that trained the weights"
    check_memory(weights.values(), source)
    if math.prod(meta.x_shape) > 1 << 16:  # then positions may take more memory than weights
        planned: list[Tensor] = []
        with suppress(UserError, RuntimeError, ArithmeticError), torch.device("meta"):  # some plug-ins need numbers
            network = _build_bounded(make, weights)
            # Positions are put together from parts in float64.
            planned = [*network.parameters(), *5 * list(network.buffers())]
        check_memory(planned, source)
    try:
        network = _build_bounded(make, weights)
    except (UserError, RuntimeError, ArithmeticError) as error:
        # Torch raises the latter two for sizes from a stranger's file, such as a width of 0.
        raise UserError(f"{source}: cannot be built: {first_line(error)}; {release}") from None
    expected = network.state_dict()
    mismatches = [
        *(f"{key!r} is missing" for key in expected if key not in weights),
        *(f"{key!r} is unexpected" for key in weights if key not in expected),
        *(
            f"{key!r} is {_described(weights[key])} instead of {_described(expected[key])}"
            for key in expected
            if key in weights and _described(weights[key]) != _described(expected[key])
        ),
    ]
    if mismatches:
        more = f" and {len(mismatches) - 3} more" if len(mismatches) > 3 else ""
        raise UserError(f"{source}: the weights do not fit: {', '.join(mismatches[:3])}{more}; {release}")
    declared = getattr(network, "prediction", None)
    if declared != meta.prediction:
        raise UserError(f"{source}: the weights predict {meta.prediction!r}, the code {declared!r}; {release}")
    return network


def _build_bounded(make: Callable[[], nn.Module], weights: Mapping[str, Tensor]) -> nn.Module:
    """Build a network, but stop when it has more than twice ``weights``: a plug-in may replace each of them once."""
    left = [2 * len(weights), 2 * sum(weight.numel() for weight in weights.values())]

    def count(_module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
        left[:] = left[0] - 1, left[1] - parameter.numel()
        if min(left) < 0:
            raise UserError("it has more weights than their file")

    hook = register_module_parameter_registration_hook(count)
    try:
        return make()
    finally:
        hook.remove()


def _described(weight: Tensor) -> str:
    kind = "floats" if weight.is_floating_point() else str(weight.dtype).removeprefix("torch.")
    return f"{kind} {list(weight.shape)}"


def write_ensemble(run_dir: Path, folders: Sequence[Path], priors: Sequence[float]) -> Path:
    """Write ``run_dir/ensemble.json`` over artifacts that lie inside ``run_dir``.

    Args:
        run_dir: the run's folder.
        folders: artifact folders of all K experts and perhaps of the router, in any order.
        priors: share of the data in each cluster, [K].

    Returns:
        The path of the written file.

    Raises:
        UserError: a folder outside ``run_dir``, a bad ``member.json``, a missing expert, or members that do
            not belong together.
        ValueError: ``priors`` are not positive or do not sum to 1.
    """
    is_right, wanted = checks.SHARES
    if not is_right(list(priors)):
        raise ValueError(f"priors must be {wanted}, not {list(priors)}")
    path = run_dir / ENSEMBLE_FILE
    root = run_dir.resolve()
    outside = [folder for folder in folders if not folder.resolve().is_relative_to(root)]
    if outside:
        raise UserError(f"{outside[0]}: lies outside {run_dir}; copy the artifact folder into it")
    manifest = _assemble(path, [(folder, read_meta(folder)) for folder in folders], list(priors))
    document = {
        "format_version": FORMAT_VERSION,
        "num_clusters": len(manifest.priors),
        "priors": list(manifest.priors),
        "partition_sha256": manifest.partition_sha256,
        "members": [
            {
                "member": member,
                "path": folder.resolve().relative_to(root).as_posix(),
                "member_json_sha256": sha256_file(folder / MEMBER_FILE),
            }
            for member, folder in manifest.folders.items()
        ],
    }
    atomic_write_json(path, document)
    return path


def read_ensemble(path: Path) -> EnsembleManifest:
    """Read and check an ``ensemble.json`` and the ``member.json`` of every artifact in it.

    Raises:
        UserError: missing, no JSON, a bad key, a path that leaves the folder, a ``member.json`` that is bad or
            whose hash differs, a missing expert, or members that do not belong together.
    """
    remedy = "fit the missing members, which writes it, or fetch it again"
    document = read_json(path, "the ensemble's manifest", remedy)
    _refuse_other_version(path, document)
    problem = checks.problem_with(document, _ENSEMBLE_CHECKS)
    if problem is not None:
        raise UserError(f"{path}: {problem}; {remedy}")
    members: list[tuple[Path, ArtifactMeta]] = []
    for entry in document["members"]:
        problem = checks.problem_with(entry, _ENTRY_CHECKS)
        if problem is None and any(meta.member == entry["member"] for _, meta in members):
            problem = f"{entry['member']} is listed twice"
        if problem is not None:
            raise UserError(f"{path}: in members: {problem}; {remedy}")
        folder = inside(path.parent, entry["path"], path)
        meta = read_meta(folder)
        if sha256_file(folder / MEMBER_FILE) != entry["member_json_sha256"] or meta.member != entry["member"]:
            raise UserError(f"{folder / MEMBER_FILE}: is not the {entry['member']} that {path} lists; {_REMEDY}")
        members.append((folder, meta))
    manifest = _assemble(path, members, document["priors"])
    if manifest.partition_sha256 != document["partition_sha256"] or len(manifest.priors) != document["num_clusters"]:
        raise UserError(f"{path}: key 'partition_sha256' or 'num_clusters' is not its members'; {remedy}")
    return manifest


def _assemble(path: Path, members: list[tuple[Path, ArtifactMeta]], priors: list[float]) -> EnsembleManifest:
    """Check that ``members`` are one ensemble; ``path`` is the manifest that error lines name."""
    by_name: dict[str, tuple[Path, ArtifactMeta]] = {}
    for folder, meta in members:
        if meta.role == "monolith":
            raise UserError(f"{path}: the monolith is no member of an ensemble; leave {folder} out")
        if meta.member in by_name:
            raise UserError(f"{path}: {meta.member} is listed twice; leave one of the two out")
        by_name[meta.member] = (folder, meta)
    order = [f"expert-{k}" for k in range(len(priors))]
    for member in order:
        if member not in by_name:
            raise UserError(f"{path}: {member} is missing; fit it (member={member}) or fetch its artifact folder")
    extra = sorted(set(by_name) - {*order, "router"})
    if extra:
        raise UserError(f"{path}: {extra[0]} has no prior among the {len(priors)} given; leave it out")
    if "router" in by_name:
        order.append("router")
    first_folder, first = by_name[order[0]]
    for folder, meta in (by_name[member] for member in order):
        compared = _SHARED_BY_ALL if meta.role == "router" else (*_SHARED_BY_ALL, *_SHARED_BY_EXPERTS)
        for key in compared:
            if getattr(meta, key) != getattr(first, key):
                raise UserError(
                    f"{folder / MEMBER_FILE}: was trained on another {_WORDS.get(key, key)} than "
                    f"{first_folder / MEMBER_FILE}; take members of one run, or fit {meta.member} again"
                )
    if first.num_clusters != len(priors):
        raise UserError(
            f"{path}: {len(priors)} priors, but the members know {first.num_clusters} clusters; fetch it again"
        )
    return EnsembleManifest(
        priors=tuple(float(prior) for prior in priors),
        partition_sha256=first.partition_sha256,
        folders={member: by_name[member][0] for member in order},
        metas={member: by_name[member][1] for member in order},
    )


def _member_problem(document: Any) -> str | None:
    problem = checks.problem_with(document, _MEMBER_CHECKS)
    if problem is not None:
        return problem
    role, _, index = document["member"].partition("-")
    if role != document["role"]:
        return f"key 'role' must be {role} for {document['member']}, not {document['role']}"
    if index and int(index) >= document["num_clusters"]:
        return f"key 'member' is {document['member']}, but key 'num_clusters' is {document['num_clusters']}"
    if (document["prediction"] is None) != (role == "router"):
        return "key 'prediction' must be null for a router and only there"
    return None


def _refuse_other_version(path: Path, document: Any) -> None:
    version = document.get("format_version", FORMAT_VERSION) if isinstance(document, dict) else FORMAT_VERSION
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format_version {str(version)[:20]!r} is unknown to this release, which reads {FORMAT_VERSION}; "
            "install the release of ddm_lightning that wrote it"
        )


def _to_json(meta: ArtifactMeta) -> dict[str, Any]:
    document = {"format_version": meta.format_version, **asdict(meta)}
    return {**document, "x_shape": list(meta.x_shape)}
