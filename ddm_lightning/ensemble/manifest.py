"""``ensemble.json``: artifacts assembled into one ensemble, and its changes. Its paths may not leave its folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from ddm_lightning.config.experiment import ConditionConfig, SampleConfig
from ddm_lightning.config.merge import expert_clusters
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, inside, sha256_file, sha256_json
from ddm_lightning.members.meta import FORMAT_VERSION, REMEDY, ArtifactMeta, MemberName, read_meta
from ddm_lightning.members.roles import EXPERT, ROUTER, expert_name, expert_number, role_of
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE, RunFolder
from ddm_lightning.members.signatures import PREPARE, accept, check_signature
from ddm_lightning.shards.manifest import manifest_path

# Experts that were added may have been trained on another partition.
_SHARED_BY_PARTITION = ("partition_sha256", "num_clusters")
_SHARED_BY_ALL = ("x_shape", "buckets", "image_encoder", "normalisation")
# The router has its own timesteps and may be unconditional.
_SHARED_BY_EXPERTS = ("condition", "caption_encoder", "timestep_shift", "shift_by_tokens")
_REMEDY = "fit the missing members, which writes it, or fetch it again"


@dataclass(frozen=True, kw_only=True)
class About:
    """Description of an ensemble, and defaults of sampling."""

    name: checks.Text
    """Name of the experiment."""
    credit: str
    """Credit required by the licence of the data; empty for none."""
    licence: str = ""
    """Licence of the weights; empty if not stated."""
    class_names: list[checks.Text] | None
    """Name of each class, if the data has some."""
    num_images: checks.Size
    """Images of all clusters."""
    seed: checks.Count
    """Default seed of the noise."""
    sample: SampleConfig
    """Default settings of sampling: the experiment's section ``sample``."""


@dataclass(frozen=True)
class _Entry:
    member: MemberName
    path: checks.Text
    """Folder of its artifact."""
    member_json_sha256: checks.Sha256


@dataclass(frozen=True, kw_only=True)
class Document:
    """Contents of ``ensemble.json``."""

    format_version: Annotated[int, checks.version(FORMAT_VERSION)]
    num_clusters: checks.Size
    priors: checks.Shares
    partition_sha256: checks.Sha256
    members: list[_Entry]
    expert_clusters: list[checks.Count]
    """Index of each expert's cluster in ``priors``."""
    changed: bool
    """Whether experts were added, removed or replaced."""
    about: About | None
    """Part of a saved ensemble."""


@dataclass(frozen=True)
class EnsembleManifest:
    """A checked ``ensemble.json``."""

    priors: tuple[float, ...]
    """Share of the data in each cluster that has experts, [K], summing to 1."""
    partition_sha256: str
    """SHA-256 of the partition that all members share; the first expert's if experts were added."""
    folders: dict[str, Path]
    """Artifact folder of each member: all M experts in order, then the router if there is one."""
    metas: dict[str, ArtifactMeta]
    """``member.json`` of each member, in the same order."""
    changed: bool = False
    """Whether experts were added, removed or replaced. They may then be of any partition, if the router knows them."""
    about: About | None = None
    """Part of a saved ensemble; a run folder holds its experiment instead."""
    lost: tuple[str, ...] = ()
    """Members without an artifact. The other fields skip clusters that have lost an expert."""
    share: float = 1.0
    """Share of the data in the clusters that are left."""
    places: dict[str, int] = field(default_factory=dict)
    """Index of each expert's cluster in ``priors``, M entries; experts of one cluster differ in their intervals."""

    @property
    def description(self) -> About:
        """The part ``about``, where there is one; ``use.saved.manifest_with_about`` fills it in."""
        assert self.about is not None
        return self.about

    @property
    def condition(self) -> ConditionConfig:
        """Kind of the experts' condition; its ``dropout`` is 0 if one of them never dropped it."""
        condition = ConditionConfig(kind=self.meta.condition.kind)
        if any(self.metas[name].condition_dropout == 0 for name in self.experts):
            condition.dropout = 0.0

        return condition

    @cached_property
    def sha256(self) -> str:
        """Hash of the members and their priors: a run and its copies have the same, wherever they are."""
        members = {name: sha256_file(folder / MEMBER_FILE) for name, folder in self.folders.items()}
        return sha256_json({"members": members, "priors": self.priors, "places": self.places})

    @property
    def experts(self) -> list[str]:
        """Names of the experts."""
        return list(self.places)

    @property
    def shares(self) -> dict[str, float]:
        """Prior of each expert's cluster."""
        return {name: self.priors[k] for name, k in self.places.items()}

    @property
    def one_per_cluster(self) -> list[str]:
        """Name of one expert of each cluster, [K]."""
        names = [""] * len(self.priors)
        for name, k in self.places.items():
            names[k] = name

        return names

    @property
    def logits(self) -> list[int]:
        """Index of each cluster's logit in the router's output, [K]; empty for a single monolith or student."""
        if self.meta.role != EXPERT:
            return []

        return [logit_of(name, self.metas[name]) for name in self.one_per_cluster]

    @property
    def class_counts(self) -> list[list[int]]:
        """Images of each class in each cluster, [K][num_classes]; empty rows where an artifact has no counts."""
        return [self.metas[name].class_counts for name in self.one_per_cluster]

    @property
    def meta(self) -> ArtifactMeta:
        """The first expert's ``member.json``; all experts share x_shape, condition, timestep_shift and encoders."""
        return next(iter(self.metas.values()))


def single(folder: Path) -> EnsembleManifest:
    """An ensemble of one artifact: the monolith, a student, or an expert alone.

    Raises:
        UserError: the artifact is damaged, a router, or an expert of some noise levels alone.
    """
    meta = read_meta(folder)
    if meta.role == ROUTER:
        raise UserError(f"{folder / MEMBER_FILE}: is a router; give an expert or the monolith")
    if checks.uncovered([meta.interval]):
        raise UserError(f"{folder / MEMBER_FILE}: knows only t in {meta.interval}; sample from the whole ensemble")

    name = meta.member
    return EnsembleManifest((1.0,), meta.partition_sha256, {name: folder}, {name: meta}, places={name: 0})


def write_ensemble(
    run_dir: Path,
    folders: Sequence[Path],
    priors: Sequence[float],
    *,
    partial: bool = False,
    expert_clusters: Sequence[int] | None = None,
) -> EnsembleManifest:
    """Write ``run_dir/ensemble.json`` over artifacts inside ``run_dir``.

    Args:
        run_dir: the run's folder.
        folders: artifact folders of all experts and perhaps of the router, in any order.
        priors: share of the data in each cluster, [K].
        partial: whether experts may be missing.
        expert_clusters: cluster of each expert, missing ones included; None for one expert per cluster.

    Raises:
        UserError: a ``member.json`` is bad, an expert is missing, or members do not belong together.
    """
    path = run_dir / ENSEMBLE_FILE
    present = {read_meta(folder).member: folder for folder in folders}
    places = _of_partition(range(len(priors)) if expert_clusters is None else expert_clusters)
    lost = _members(places) - present.keys() if partial else ()
    manifest = checked(path, present, priors, places, lost=lost)
    write_manifest(run_dir, replace(manifest, priors=tuple(priors), places=places))
    return manifest


def _of_partition(expert_clusters: Sequence[int]) -> dict[str, int]:
    """Cluster of each expert of an ensemble whose experts have not been changed."""
    return {expert_name(number): cluster for number, cluster in enumerate(expert_clusters)}


def _members(places: Mapping[str, int]) -> set[str]:
    """Members of an ensemble whose experts have not been changed."""
    members = {*places}
    if len({*places.values()}) > 1:
        members.add(ROUTER)

    return members


def write_manifest(root: Path, manifest: EnsembleManifest) -> None:
    """Write ``root/ensemble.json``, unchecked; the artifacts must be inside ``root``."""
    members = []
    for name, folder in manifest.folders.items():
        relative = folder.absolute().relative_to(root.absolute())
        members.append(_Entry(name, relative.as_posix(), sha256_file(folder / MEMBER_FILE)))

    document = Document(
        format_version=FORMAT_VERSION,
        num_clusters=len(manifest.priors),
        priors=manifest.priors,
        partition_sha256=manifest.partition_sha256,
        members=members,
        expert_clusters=list(manifest.places.values()),
        changed=manifest.changed,
        about=manifest.about,
    )
    atomic_write_json(root / ENSEMBLE_FILE, asdict(document))


def read_document(path: Path) -> Document:
    """Read an ``ensemble.json`` and check its keys, but not its artifacts.

    Raises:
        UserError: it is missing or not JSON, or has a bad key.
    """
    return checks.read_record(path, Document, "the ensemble's manifest", _REMEDY)


def read_ensemble(path: Path, *, partial: bool = False) -> EnsembleManifest:
    """Read and check an ``ensemble.json`` and the ``member.json`` of each of its artifacts.

    Args:
        path: the file.
        partial: whether to leave out members that are not listed or whose artifacts are missing.

    Raises:
        UserError: as ``read_document``; a path leaves its folder; a ``member.json`` is bad or has another hash; an
            expert is missing; or members do not belong together.
    """
    document = read_document(path)
    folders = {}
    for entry in document.members:
        folders[entry.member] = _artifact_folder(entry, path, is_run=document.about is None)

    if document.changed:
        experts = [name for name in folders if name != ROUTER]
        places = dict(zip(experts, document.expert_clusters, strict=False))
        members = {*folders}
    else:
        places = _of_partition(document.expert_clusters)
        members = _members(places)

    present = folders
    lost = set[str]()
    if partial:
        present = {name: folder for name, folder in folders.items() if (folder / MEMBER_FILE).exists()}
        lost = members - present.keys()

    manifest = checked(path, present, document.priors, places, lost=lost, changed=document.changed)
    for entry in document.members:
        file = folders[entry.member] / MEMBER_FILE
        if entry.member in present and sha256_file(file) != entry.member_json_sha256:
            raise UserError(f"{file}: is not the {entry.member} that {path} lists; {REMEDY}")

    return replace(manifest, about=document.about)


def _artifact_folder(entry: _Entry, path: Path, *, is_run: bool) -> Path:
    """Folder of an entry of the manifest ``path``; in a run, the member's folder and ``members`` may be links."""
    folder = RunFolder(path.parent).artifact(entry.member)
    if is_run and folder == path.parent / entry.path:
        inside(folder.parent, folder.name, path)
        return folder

    return inside(path.parent, entry.path, path)


def checked(
    path: Path,
    folders: Mapping[str, Path],
    priors: Sequence[float],
    places: Mapping[str, int],
    *,
    lost: Collection[str] = (),
    changed: bool = False,
) -> EnsembleManifest:
    """Check that artifacts belong together. Error lines name the manifest ``path``.

    A cluster is skipped if any of its experts is lost.

    Args:
        path: the manifest.
        folders: artifact folder of each member, by its name in the ensemble.
        priors: of all clusters, lost ones included.
        places: index of each expert's cluster in ``priors``, lost ones included.
        lost: names without an artifact.
        changed: whether experts were added, removed or replaced.

    Raises:
        UserError: an artifact is damaged, an expert is missing, or members do not belong together.
    """
    given = {*folders, *lost}
    if given - {ROUTER} != places.keys() or {*places.values()} != {*range(len(priors))}:
        listed = ", ".join(sorted(given))
        raise UserError(f"{path}: {len(priors)} priors of {', '.join(places)}, but lists {listed}; {_REMEDY}")

    incomplete = {k for name, k in places.items() if name not in folders}
    kept = {name: k for name, k in places.items() if k not in incomplete}
    if not kept:
        raise UserError(f"{path}: every expert is missing; fetch their artifact folders")

    names = list(kept)
    if ROUTER in folders:
        names.append(ROUTER)

    metas = {name: read_meta(folders[name]) for name in names}
    _check_members(path, folders, metas, kept, changed)
    num_clusters = metas[names[0]].num_clusters
    if not changed and num_clusters != len(priors):
        raise UserError(f"{path}: {len(priors)} priors, but the members know {num_clusters} clusters; {_REMEDY}")

    clusters = sorted({*kept.values()})
    for k in clusters:
        _check_experts(path, {name: metas[name] for name in kept if kept[name] == k}, changed)

    share = sum(priors[k] for k in clusters) if lost else 1.0
    return EnsembleManifest(
        priors=tuple(priors[k] / share for k in clusters),
        partition_sha256=metas[names[0]].partition_sha256,
        folders={name: folders[name] for name in names},
        metas=metas,
        changed=changed,
        lost=tuple(sorted(lost)),
        share=share,
        places={name: clusters.index(k) for name, k in kept.items()},
    )


def _check_members(
    path: Path,
    folders: Mapping[str, Path],
    metas: Mapping[str, ArtifactMeta],
    places: Mapping[str, int],
    changed: bool,
) -> None:
    """Refuse an artifact of another member, or of another partition, data or condition than the first expert's."""
    first, *_ = metas
    for name, meta in metas.items():
        file = folders[name] / MEMBER_FILE
        is_own = meta.role == role_of(name).name
        if not changed:
            is_own = is_own and meta.member == name and meta.cluster == places.get(name)
        elif name != ROUTER:
            is_own = is_own and knows(metas.get(ROUTER), name, meta)

        if not is_own:
            raise UserError(f"{file}: is not the {name} that {path} lists; {REMEDY}")

        shared = list(_SHARED_BY_ALL)
        if not changed:
            shared += _SHARED_BY_PARTITION
        if name != ROUTER:
            shared += _SHARED_BY_EXPERTS

        for key in shared:
            if getattr(meta, key) != getattr(metas[first], key):
                raise UserError(
                    f"{file}: has another value of {key} than {folders[first] / MEMBER_FILE}; "
                    "take members of one run, or fit one of the two again"
                )


def _check_experts(path: Path, metas: Mapping[str, ArtifactMeta], changed: bool) -> None:
    """Refuse experts of one cluster that were trained on several, or whose intervals leave a gap or overlap."""
    problem = checks.uncovered([meta.interval for meta in metas.values()])
    if len(set(map(cluster_of, metas.values()))) > 1:
        problem = "experts of several clusters"

    if problem:
        remedy = "give an expert of their cluster for these noise levels" if changed else _REMEDY
        raise UserError(f"{path}: {', '.join(metas)}: {problem}; {remedy}")


def cluster_of(expert: ArtifactMeta) -> str:
    """Name of an expert's cluster among those of all partitions."""
    return f"{expert.partition_sha256}/{EXPERT}-{expert.cluster}"


def known_clusters(router: ArtifactMeta) -> list[str]:
    """Cluster that each of a router's logits stands for."""
    if router.clusters:
        return router.clusters

    return [f"{router.partition_sha256}/{expert_name(k)}" for k in range(router.num_clusters)]


def knows(router: ArtifactMeta | None, name: str, expert: ArtifactMeta) -> bool:
    """Whether the router's logit for ``name`` stands for the expert's cluster; True without a router."""
    if router is None:
        return True

    known = known_clusters(router)
    logit = logit_of(name, expert)
    return logit < len(known) and known[logit] == cluster_of(expert)


def logit_of(name: str, expert: ArtifactMeta) -> int:
    """Index of the router's logit for an expert's cluster; for an expert of other data, the number in its ``name``."""
    assert expert.cluster is not None
    if expert.member == name:
        return expert.cluster

    return expert_number(name)


def assemble(run: Run, *, partial: bool = False) -> bool:
    """Write ``ensemble.json`` over the artifacts of all members, which must be finished.

    Args:
        run: the run.
        partial: whether to leave out members that are not finished.

    Returns:
        Whether the ensemble has changed.

    Raises:
        UserError: artifacts are damaged or do not belong together, or a signature is refused.
    """
    check_signature(PREPARE, manifest_path(run.folder.root), run.experiment)
    folders = []
    for name in run.names:
        if not partial or run.is_finished(name):
            folder = run.folder.artifact(name)
            accept(name, folder, run)
            folders.append(folder)

    try:
        before = read_ensemble(run.folder.ensemble, partial=partial).metas
    except UserError:  # none yet, or its artifacts have changed
        before = {}

    priors = run.manifest.priors
    clusters = expert_clusters(run.experiment)
    written = write_ensemble(run.folder.root, folders, priors, partial=partial, expert_clusters=clusters)
    return written.metas != before
