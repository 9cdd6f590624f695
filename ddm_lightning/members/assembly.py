"""``ensemble.json``: a run's artifacts assembled into one ensemble. Its paths may not leave its folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, inside, sha256_file
from ddm_lightning.core.weights import check_recorded
from ddm_lightning.members.artifact import (
    FORMAT_VERSION,
    MEMBER,
    REMEDY,
    VERSION,
    WEIGHTS_FILE,
    ArtifactMeta,
    described,
    read_meta,
)
from ddm_lightning.members.member import ROUTER, Member, ensemble_members, expert_name
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE, RunFolder, read_record
from ddm_lightning.shards.manifest import Manifest

_SHARED_BY_ALL = ("partition_sha256", "num_clusters", "x_shape", "image_encoder", "normalisation")
# The router has its own timesteps and may be unconditional.
_SHARED_BY_EXPERTS = ("condition", "caption_encoder", "timestep_shift")
_CHECKS: dict[str, checks.Check] = {
    "format_version": VERSION,
    "num_clusters": checks.integer(1),
    "priors": checks.SHARES,
    "partition_sha256": checks.SHA256,
    "members": checks.LIST,
}
_ENTRY_CHECKS: dict[str, checks.Check] = {"member": MEMBER, "path": checks.TEXT, "member_json_sha256": checks.SHA256}


@dataclass(frozen=True)
class EnsembleManifest:
    """A checked ``ensemble.json``."""

    priors: tuple[float, ...]
    """Share of the data in each cluster, [K], summing to 1."""
    partition_sha256: str
    """SHA-256 of the partition that all members share."""
    folders: dict[str, Path]
    """Artifact folder of each member: all experts in order, then the router if there is one."""
    metas: dict[str, ArtifactMeta]
    """``member.json`` of each member, in the same order."""


def write_ensemble(run_dir: Path, folders: Sequence[Path], priors: Sequence[float]) -> None:
    """Write ``run_dir/ensemble.json`` over artifacts inside ``run_dir``.

    Args:
        run_dir: the run's folder.
        folders: artifact folders of all K experts and perhaps of the router, in any order.
        priors: share of the data in each cluster, [K].

    Raises:
        UserError: a folder is outside ``run_dir``, a ``member.json`` is bad, an expert is missing, or members do not
            belong together.
    """
    root = run_dir.resolve()
    outside = [folder for folder in folders if not folder.resolve().is_relative_to(root)]
    if outside:
        raise UserError(f"{outside[0]}: lies outside {run_dir}; copy the artifact folder into it")
    path = run_dir / ENSEMBLE_FILE
    manifest = _checked(path, ((folder, read_meta(folder)) for folder in folders), priors)
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


def read_ensemble(path: Path) -> EnsembleManifest:
    """Read and check an ``ensemble.json`` and the ``member.json`` of each of its artifacts.

    Raises:
        UserError: it is missing or not JSON, has a bad key, or a path that leaves its folder; a ``member.json`` is bad
            or has another hash; an expert is missing; or members do not belong together.
    """
    remedy = "fit the missing members, which writes it, or fetch it again"
    document = read_record(path, _CHECKS, "the ensemble's manifest", remedy)

    def members() -> Iterator[tuple[Path, ArtifactMeta]]:
        for entry in document["members"]:
            if problem := checks.problem_with(entry, _ENTRY_CHECKS):
                raise UserError(f"{path}: in members: {problem}; {remedy}")
            folder = inside(path.parent, entry["path"], path)
            meta = read_meta(folder)
            if sha256_file(folder / MEMBER_FILE) != entry["member_json_sha256"] or meta.member != entry["member"]:
                raise UserError(f"{folder / MEMBER_FILE}: is not the {entry['member']} that {path} lists; {REMEDY}")
            yield folder, meta

    manifest = _checked(path, members(), document["priors"])
    if manifest.partition_sha256 != document["partition_sha256"] or len(manifest.priors) != document["num_clusters"]:
        raise UserError(f"{path}: key 'partition_sha256' or 'num_clusters' differs from its members'; {remedy}")
    return manifest


def _checked(path: Path, members: Iterable[tuple[Path, ArtifactMeta]], priors: Sequence[float]) -> EnsembleManifest:
    """Check that ``members`` are one ensemble. Error lines name the manifest ``path``."""
    found: dict[str, tuple[Path, ArtifactMeta]] = {}
    for folder, meta in members:
        if meta.member in found:
            raise UserError(f"{path}: {meta.member} is listed twice; remove one of the two")
        found[meta.member] = (folder, meta)
    order = [expert_name(k) for k in range(len(priors))]
    for member in order:
        if member not in found:
            raise UserError(f"{path}: {member} is missing; fit it (member={member}) or fetch its artifact folder")
    if extra := sorted(found.keys() - {*order, ROUTER}):
        raise UserError(f"{path}: {extra[0]} has no prior among the {len(priors)} given; remove it")
    if ROUTER in found:
        order.append(ROUTER)
    first_folder, first = found[order[0]]
    for folder, meta in (found[member] for member in order):
        for key in _SHARED_BY_ALL if meta.role == ROUTER else (*_SHARED_BY_ALL, *_SHARED_BY_EXPERTS):
            if getattr(meta, key) != getattr(first, key):
                raise UserError(
                    f"{folder / MEMBER_FILE}: was trained on another {key} than "
                    f"{first_folder / MEMBER_FILE}; take members of one run, or fit one of the two again"
                )
    if first.num_clusters != len(priors):
        raise UserError(
            f"{path}: {len(priors)} priors, but the members know {first.num_clusters} clusters; fetch it again"
        )
    return EnsembleManifest(
        priors=tuple(float(prior) for prior in priors),
        partition_sha256=first.partition_sha256,
        folders={member: found[member][0] for member in order},
        metas={member: found[member][1] for member in order},
    )


def assemble(experiment: Experiment, run: RunFolder) -> bool:
    """Write ``ensemble.json`` over the artifacts of all members, which must be finished.

    Returns:
        Whether the ensemble has changed.

    Raises:
        UserError: artifacts are damaged or do not belong together.
    """
    try:
        listed = read_ensemble(run.ensemble).metas
    except UserError:  # none yet, or its artifacts have changed
        listed = {}
    folders = [run.artifact(member) for member in ensemble_members(experiment)]
    for folder in folders:
        meta = read_meta(folder)
        if listed.get(meta.member) != meta:  # hash only new weights: they are gigabytes
            check_recorded(folder / WEIGHTS_FILE, meta.model_sha256, REMEDY)
    before = run.ensemble.read_bytes() if run.ensemble.exists() else None
    write_ensemble(run.root, folders, Manifest.read(run.root).priors)
    return run.ensemble.read_bytes() != before


def refuse_stale(members: Sequence[str], experiment: Experiment, run: RunFolder) -> None:
    """Check that the artifacts of finished members belong to ``experiment``.

    One with fewer steps is allowed if its training can continue: with a constant schedule and a checkpoint.

    Raises:
        UserError: an artifact is another member's or was trained with other settings.
    """
    manifest = Manifest.read(run.root)
    for name in filter(run.is_finished, members):
        folder, meta = run.artifact(name), read_meta(run.artifact(name))
        member = Member.resolve(name, experiment, manifest)
        steps = member.train.max_steps
        has_checkpoint = any((run.member(name) / "checkpoints").glob("step-*.ckpt"))
        can_continue = meta.step < steps and member.train.schedule == "constant" and has_checkpoint
        wanted = described(member, manifest)
        differing = [key for key, value in wanted.items() if getattr(meta, key) != value]
        if meta.member != name:
            problem = f"is the artifact of {meta.member}, not of {name}"
        elif "partition_sha256" in differing:
            problem = "was trained on clusters that have changed since, or on those of another run"
        elif meta.step != steps and not can_continue:
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
