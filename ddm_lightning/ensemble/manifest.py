"""``ensemble.json``: artifacts assembled into one ensemble, and its changes. Its paths may not leave its folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.config.merge import expert_clusters
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, inside, sha256_file
from ddm_lightning.core.weights import check_recorded
from ddm_lightning.members.artifact import (
    FORMAT_VERSION,
    REMEDY,
    WEIGHTS_FILE,
    ArtifactMeta,
    MemberName,
    read_meta,
)
from ddm_lightning.members.load import Bases
from ddm_lightning.members.member import EXPERT, ROUTER, expert_name, expert_number, role_of
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE, RunFolder
from ddm_lightning.members.signatures import accept, check_manifest
from ddm_lightning.shards.manifest import manifest_path

# Experts that were added may have been trained on another partition.
_SHARED_BY_PARTITION = ("partition_sha256", "num_clusters")
_SHARED_BY_ALL = ("x_shape", "image_encoder", "normalisation")
# The router has its own timesteps and may be unconditional.
_SHARED_BY_EXPERTS = ("condition", "caption_encoder", "timestep_shift")
_REMEDY = "fit the missing members, which writes it, or fetch it again"


@dataclass(frozen=True, kw_only=True)
class About:
    """What sampling needs besides artifacts."""

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

    format_version: Annotated[int, checks.version(FORMAT_VERSION)] = FORMAT_VERSION
    num_clusters: checks.Size
    priors: checks.Shares
    partition_sha256: checks.Sha256
    members: list[_Entry]
    expert_clusters: list[checks.Count] | None = None
    """Place of each expert's cluster in ``priors``; None for one expert per cluster."""
    changed: bool = False
    """Whether experts were added, removed or replaced."""
    about: About | None = None
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
    lost: Mapping[str, float] = field(default_factory=dict)
    """Listed members without an artifact, and their priors (a router's is 0); ``priors`` leaves them out."""
    expert_clusters: tuple[int, ...] = (0,)
    """Place of each expert's cluster in ``priors``, [M]; experts of one cluster differ in their intervals."""

    @property
    def description(self) -> About:
        """The part ``about``, where there is one; ``use.saved.manifest_with_about`` fills it in."""
        assert self.about is not None
        return self.about

    @property
    def experts(self) -> list[str]:
        """Names of the experts, in the order of ``expert_clusters``."""
        return [name for name in self.folders if name != ROUTER]

    @property
    def places(self) -> dict[str, int]:
        """Place of each expert's cluster in ``priors``."""
        return dict(zip(self.experts, self.expert_clusters, strict=True))

    @property
    def shares(self) -> dict[str, float]:
        """Prior of each expert's cluster."""
        return {name: self.priors[k] for name, k in self.places.items()}

    @property
    def one_per_cluster(self) -> list[str]:
        """Name of one expert of each cluster, [K]."""
        of_cluster = {k: name for name, k in self.places.items()}
        return [of_cluster[k] for k in sorted(of_cluster)]

    @property
    def logits(self) -> list[int]:
        """Which of the router's logits stands for each cluster, [K]; empty for a single monolith or student."""
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

    return EnsembleManifest((1.0,), meta.partition_sha256, {meta.member: folder}, {meta.member: meta})


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
    present = {read_meta(folder).member: folder for folder in folders}
    clusters = tuple(range(len(priors)) if expert_clusters is None else expert_clusters)
    manifest = checked(
        run_dir / ENSEMBLE_FILE,
        present,
        priors,
        lost=_of_partition(clusters) - {*present} if partial else (),
        expert_clusters=clusters,
    )
    write_manifest(run_dir, replace(manifest, priors=tuple(priors), expert_clusters=clusters))
    return manifest


def _of_partition(expert_clusters: Sequence[int]) -> set[str]:
    """Names of the members of an ensemble whose experts have not been changed."""
    return {*map(expert_name, range(len(expert_clusters))), *([ROUTER] if max(expert_clusters) else [])}


def write_manifest(root: Path, manifest: EnsembleManifest) -> None:
    """Write ``root/ensemble.json``, unchecked; the artifacts must be inside ``root``."""
    members = []
    for name, folder in manifest.folders.items():
        members.append(
            _Entry(name, folder.absolute().relative_to(root.absolute()).as_posix(), sha256_file(folder / MEMBER_FILE))
        )

    document = Document(
        num_clusters=len(manifest.priors),
        priors=manifest.priors,
        partition_sha256=manifest.partition_sha256,
        members=members,
        expert_clusters=list(manifest.expert_clusters),
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
    priors = document.priors
    clusters = document.expert_clusters or [*range(len(priors))]
    folders = {entry.member: _artifact_folder(entry, path, is_run=document.about is None) for entry in document.members}
    order = None
    if document.changed:
        order = [name for name in folders if name != ROUTER]

    present = folders
    lost = set[str]()
    if partial:
        present = {}
        for name, folder in folders.items():
            if (folder / MEMBER_FILE).exists():
                present[name] = folder

        if order:
            all_names = {*folders}
        else:
            all_names = _of_partition(clusters)

        lost = all_names - {*present}

    manifest = checked(path, present, priors, order, lost, clusters)
    for entry in document.members:
        file = folders[entry.member] / MEMBER_FILE
        if entry.member in present and sha256_file(file) != entry.member_json_sha256:
            raise UserError(f"{file}: is not the {entry.member} that {path} lists; {REMEDY}")

    is_other = not document.changed and manifest.partition_sha256 != document.partition_sha256
    if is_other or len(priors) != document.num_clusters:
        raise UserError(f"{path}: key 'partition_sha256' or 'num_clusters' differs from its members'; {_REMEDY}")

    return replace(manifest, about=document.about)


def _artifact_folder(entry: _Entry, path: Path, *, is_run: bool) -> Path:
    """Folder of an entry of the manifest ``path``; of a run, the member's folder or ``members`` may be a link."""
    folder = RunFolder(path.parent).artifact(entry.member)
    if is_run and folder == path.parent / entry.path:
        inside(folder.parent, folder.name, path)
        return folder

    return inside(path.parent, entry.path, path)


def checked(
    path: Path,
    folders: Mapping[str, Path],
    priors: Sequence[float],
    order: list[str] | None = None,
    lost: Collection[str] = (),
    expert_clusters: Sequence[int] | None = None,
) -> EnsembleManifest:
    """Check that artifacts belong together. Error lines name the manifest ``path``.

    A cluster of which any expert is lost is left out.

    Args:
        path: the manifest.
        folders: artifact folder of each member, by its name in the ensemble.
        priors: of all clusters, lost ones included.
        order: names of the experts of a changed ensemble; None for those of one partition.
        lost: names without an artifact.
        expert_clusters: place of each expert's cluster in ``priors``, lost ones included; None if each has its own.

    Raises:
        UserError: an artifact is damaged, an expert is missing, or members do not belong together.
    """
    clusters = range(len(priors)) if expert_clusters is None else expert_clusters
    changed = order is not None
    experts = order or [expert_name(number) for number in range(len(clusters))]
    if (
        {*folders, *lost} - {ROUTER} != {*experts}
        or len(experts) != len(clusters)
        or {*clusters} != {*range(len(priors))}
    ):
        listed = ", ".join(sorted({*folders, *lost}))
        raise UserError(f"{path}: {len(priors)} priors of {', '.join(experts)}, but lists {listed}; {_REMEDY}")

    of_expert = dict(zip(experts, clusters, strict=True))
    incomplete = {k for name, k in of_expert.items() if name not in folders}
    kept = {name: k for name, k in of_expert.items() if k not in incomplete}
    shares = {k: priors[k] for k in sorted({*kept.values()})}
    if not shares:
        raise UserError(f"{path}: every expert is missing; fetch their artifact folders")

    names = [*kept, *([ROUTER] if ROUTER in folders else [])]
    metas = {name: read_meta(folders[name]) for name in names}
    first = metas[names[0]]
    router = metas.get(ROUTER)
    for name, meta in metas.items():
        file = folders[name] / MEMBER_FILE
        is_own = changed or (meta.member == name and meta.cluster == kept.get(name))
        if changed and name != ROUTER:
            is_own = knows(router, name, meta)
        if meta.role != role_of(name).name or not is_own:
            raise UserError(f"{file}: is not the {name} that {path} lists; {REMEDY}")

        shared = _SHARED_BY_ALL if name == ROUTER else (*_SHARED_BY_ALL, *_SHARED_BY_EXPERTS)
        for key in shared if changed else (*_SHARED_BY_PARTITION, *shared):
            if getattr(meta, key) != getattr(first, key):
                raise UserError(
                    f"{file}: was trained on another {key} than {folders[names[0]] / MEMBER_FILE}; "
                    "take members of one run, or fit one of the two again"
                )

    adapters = {name: meta.base_sha256 for name, meta in metas.items() if meta.base_sha256 is not None}
    for name, base in adapters.items():
        if base != next(iter(adapters.values())):
            raise UserError(
                f"{folders[name] / MEMBER_FILE}: is an adapter for another base than that of {next(iter(adapters))}; "
                "take adapters of one base"
            )

    if not changed and first.num_clusters != len(priors):
        raise UserError(f"{path}: {len(priors)} priors, but the members know {first.num_clusters} clusters; {_REMEDY}")

    for k in shares:
        own = [name for name in kept if kept[name] == k]
        problem = checks.uncovered([metas[name].interval for name in own])
        if len({cluster_of(metas[name]) for name in own}) > 1:
            problem = "experts of several clusters"

        if problem:
            if changed:
                remedy = "give an expert of their cluster for these noise levels"
            else:
                remedy = _REMEDY

            raise UserError(f"{path}: {', '.join(own)}: {problem}; {remedy}")

    if lost:
        total = sum(shares.values())
    else:
        total = 1

    missing = [of_expert[name] for name in lost if name in of_expert]
    return EnsembleManifest(
        priors=tuple(share / total for share in shares.values()),
        partition_sha256=first.partition_sha256,
        folders={name: folders[name] for name in names},
        metas=metas,
        changed=changed,
        lost={
            name: priors[of_expert[name]] / missing.count(of_expert[name]) if name in of_expert else 0.0
            for name in sorted(lost)
        },
        expert_clusters=tuple(list(shares).index(k) for k in kept.values()),
    )


def cluster_of(expert: ArtifactMeta) -> str:
    """Name of an expert's cluster among those of all partitions."""
    return f"{expert.partition_sha256}/{EXPERT}-{expert.cluster}"


def known_clusters(router: ArtifactMeta) -> list[str]:
    """Cluster that each of a router's logits stands for."""
    return router.clusters or [f"{router.partition_sha256}/{expert_name(k)}" for k in range(router.num_clusters)]


def knows(router: ArtifactMeta | None, name: str, expert: ArtifactMeta) -> bool:
    """Whether the router's logit for ``name`` stands for the expert's cluster; True without a router."""
    return router is None or dict(enumerate(known_clusters(router))).get(logit_of(name, expert)) == cluster_of(expert)


def logit_of(name: str, expert: ArtifactMeta) -> int:
    """Which of a router's logits stands for the expert's cluster; that of other data has the number of ``name``."""
    assert expert.cluster is not None
    if expert.member == name:
        return expert.cluster

    return expert_number(name)


def assemble(run: Run, *, partial: bool = False) -> bool:
    """Write ``ensemble.json`` over the artifacts of all members, which must be finished.

    Args:
        run: the run.
        partial: whether to leave out those that are not.

    Returns:
        Whether the ensemble has changed.

    Raises:
        UserError: artifacts are damaged or do not belong together, or a signature is refused.
    """
    check_manifest(run.experiment, manifest_path(run.folder.root))
    folders = {name: run.folder.artifact(name) for name in run.names if not partial or run.is_finished(name)}
    for name, folder in folders.items():
        accept(name, folder, run)

    try:
        listed = read_ensemble(run.folder.ensemble, partial=partial).metas
    except UserError:  # none yet, or its artifacts have changed
        listed = {}

    for folder in folders.values():
        meta = read_meta(folder)
        if listed.get(meta.member) != meta:  # hash only new weights: they are gigabytes
            check_recorded(folder / WEIGHTS_FILE, meta.model_sha256, REMEDY)
        if meta.base_sha256 is not None:
            Bases([folder]).file(meta, str(folder / MEMBER_FILE))

    clusters = expert_clusters(run.experiment)
    all_folders = [*folders.values()]
    root = run.folder.root
    priors = run.manifest.priors
    return write_ensemble(root, all_folders, priors, partial=partial, expert_clusters=clusters).metas != listed
