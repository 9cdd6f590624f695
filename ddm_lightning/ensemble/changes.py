"""Change the experts of an ensemble without training: each function returns the changed manifest and writes nothing.

Without a router (``bayes``) only the priors change. A router loses the logits of clusters that leave, which is exact.
It cannot know clusters that come, so an ensemble with an expert of other data has none, unless it is extended
(``training.extension``).
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.manifest import EnsembleManifest, checked, knows
from ddm_lightning.ensemble.routing import with_strategy
from ddm_lightning.members.artifact import load_network, read_meta
from ddm_lightning.members.roles import EXPERT, ROUTER, cluster_of_expert, expert_name
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE


def removed(ensemble: EnsembleManifest, name: str) -> EnsembleManifest:
    """Remove the expert ``name``, and its images from the priors. The other artifacts stay bit for bit.

    Raises:
        UserError: there is no such expert, or no other.
    """
    counts = _counts(ensemble)
    if name not in ensemble.lost:
        _require(ensemble, name)
        del counts[name]
    if not counts:
        raise UserError(f"{name}: is the only expert; an ensemble needs one")
    return _changed(ensemble, {key: path for key, path in ensemble.folders.items() if key != name}, counts)


def added(ensemble: EnsembleManifest, folder: Path, num_images: int, router: Path | None = None) -> EnsembleManifest:
    """Add the expert of the artifact ``folder``.

    An expert of the ensemble's own partition that is not there gets its own place back, and the router knows it. Any
    other gets the next free number, and the ensemble loses its router, unless it gets one that knows the expert.

    Args:
        ensemble: the ensemble.
        folder: the expert's artifact.
        num_images: images in its cluster, which give it its prior.
        router: artifact of an extended router.

    Raises:
        UserError: the artifact is damaged, unusable, no expert's or there already, or does not go with the others.
    """
    meta = read_meta(folder)
    if present := [name for name in ensemble.experts if ensemble.metas.get(name) == meta]:
        raise UserError(f"{folder}: is already in the ensemble as {present[0]}; add another expert")
    name, num_clusters = meta.member, max(meta.num_clusters for meta in ensemble.metas.values())
    if meta.partition_sha256 != ensemble.partition_sha256 or name in ensemble.folders:
        taken = [cluster_of_expert(name) for name in ensemble.experts]
        name = expert_name(max(num_clusters, *(k + 1 for k in taken)))
    return _with_artifact(ensemble, name, folder, num_images, router)


def replaced(ensemble: EnsembleManifest, name: str, folder: Path, num_images: int | None = None) -> EnsembleManifest:
    """Replace the expert ``name`` by that of the artifact ``folder``.

    Args:
        ensemble: the ensemble.
        name: the expert to replace.
        folder: artifact of another training on the same cluster, or of another cluster; the latter costs the router.
        num_images: images in its cluster; None keeps the prior.

    Raises:
        UserError: there is no such expert, or as ``added``.
    """
    _require(ensemble, name)
    return _with_artifact(ensemble, name, folder, num_images or _counts(ensemble)[name])


def _with_artifact(
    ensemble: EnsembleManifest, name: str, folder: Path, num_images: int, router: Path | None = None
) -> EnsembleManifest:
    meta = read_meta(folder)
    if meta.role != EXPERT:
        raise UserError(f"{folder / MEMBER_FILE}: is the {meta.role}; give the artifact of an expert")
    load_network(folder, mapped=True)  # refuses weights that no sampling could load
    counts = {**_counts(ensemble), name: num_images}
    order = sorted(counts, key=cluster_of_expert)
    folders = {key: folder if key == name else ensemble.folders[key] for key in order}
    router = router or ensemble.folders.get(ROUTER)
    if router is not None and knows(read_meta(router), name, meta):
        folders[ROUTER] = router
    return _changed(ensemble, folders, {key: counts[key] for key in order})


def _changed(ensemble: EnsembleManifest, folders: dict[str, Path], counts: dict[str, int]) -> EnsembleManifest:
    total, about = sum(counts.values()), ensemble.about
    assert about is not None
    sample = SampleConfig(**about.sample)
    if ROUTER not in folders and STRATEGIES.get(sample.strategy).needs_router:  # type: ignore[attr-defined]
        sample = with_strategy(sample, "bayes")
    manifest = checked(Path(ENSEMBLE_FILE), folders, [count / total for count in counts.values()], list(counts))
    return replace(manifest, about=replace(about, num_images=total, sample=asdict(sample)))


def _counts(ensemble: EnsembleManifest) -> dict[str, int]:
    """Images of each expert's cluster, at least 1."""
    assert ensemble.about is not None
    num_images, shares = ensemble.about.num_images, zip(ensemble.experts, ensemble.priors, strict=True)
    return {name: max(1, round(share * num_images)) for name, share in shares}


def _require(ensemble: EnsembleManifest, name: str) -> None:
    if name not in ensemble.experts:
        raise UserError(f"{name}: no such expert; the ensemble has {', '.join(ensemble.experts)}")
