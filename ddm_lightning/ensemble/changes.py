"""Changes of an ensemble's experts without training: each function returns the changed manifest and writes nothing.

Without a router (``bayes``) only the priors change. The logits of removed clusters are dropped from a router, which is
exact. It does not know new clusters, so an ensemble with an expert of other data has no router, unless it is extended
(``training.extension``).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.ensemble.manifest import EnsembleManifest, checked, knows
from ddm_lightning.members.load import Bases, load_network
from ddm_lightning.members.meta import read_meta
from ddm_lightning.members.roles import EXPERT, ROUTER, expert_name, expert_number
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE


def removed(ensemble: EnsembleManifest, name: str) -> EnsembleManifest:
    """Remove the expert ``name`` and all others of its cluster, and its images from the priors.

    The other artifacts stay bit for bit.

    Raises:
        UserError: there is no such expert, or no other.
    """
    folders = dict(ensemble.folders)
    if name not in ensemble.lost:
        _require(ensemble, name)
        for other, k in ensemble.places.items():
            if k == ensemble.places[name]:
                del folders[other]

    if not folders.keys() - {ROUTER}:
        raise UserError(f"{name}: is the only expert; an ensemble needs one")

    return _changed(ensemble, folders)


def added(ensemble: EnsembleManifest, folder: Path, num_images: int, router: Path | None = None) -> EnsembleManifest:
    """Add the expert of the artifact ``folder``.

    A missing expert of the ensemble's own partition gets its old name, and the router already knows its cluster. Any
    other expert gets the next free number. The ensemble then loses its router, unless ``router`` replaces it.

    Args:
        ensemble: the ensemble.
        folder: the expert's artifact.
        num_images: images in its cluster, which give it its prior.
        router: artifact of an extended router.

    Raises:
        UserError: the artifact is damaged, unusable, not an expert's or already there, or does not fit the others.
    """
    meta = read_meta(folder)
    for present in ensemble.experts:
        if ensemble.metas[present] == meta:
            raise UserError(f"{folder}: is already in the ensemble as {present}; add another expert")

    name = meta.member
    if meta.partition_sha256 != ensemble.partition_sha256 or name in ensemble.folders:
        num_clusters = max(meta.num_clusters for meta in ensemble.metas.values())
        last = max(map(expert_number, ensemble.experts))
        name = expert_name(max(num_clusters, last + 1))

    return _with_artifact(ensemble, name, folder, num_images, router)


def replaced(ensemble: EnsembleManifest, name: str, folder: Path, num_images: int | None = None) -> EnsembleManifest:
    """Replace the expert ``name`` by that of the artifact ``folder``.

    Args:
        ensemble: the ensemble.
        name: the expert to replace.
        folder: artifact of another training on the same cluster, or of another cluster, which drops the router.
        num_images: images in its cluster; None keeps the prior.

    Raises:
        UserError: there is no such expert, or as ``added``.
    """
    _require(ensemble, name)
    return _with_artifact(ensemble, name, folder, num_images)


def _with_artifact(
    ensemble: EnsembleManifest, name: str, folder: Path, num_images: int | None, router: Path | None = None
) -> EnsembleManifest:
    meta = read_meta(folder)
    if meta.role != EXPERT:
        raise UserError(f"{folder / MEMBER_FILE}: is the {meta.role}; give the artifact of an expert")

    # Refuses weights that no sampling could load.
    load_network(folder, mapped=True, bases=Bases([folder, *ensemble.folders.values()]))
    folders = {**ensemble.folders, name: folder}
    former = folders.pop(ROUTER, None)
    router = router or former
    if router is not None and knows(read_meta(router), name, meta):
        folders[ROUTER] = router

    return _changed(ensemble, folders, name, num_images)


def _changed(
    ensemble: EnsembleManifest, folders: dict[str, Path], name: str = "", num_images: int | None = None
) -> EnsembleManifest:
    """The ensemble of ``folders``; the cluster of the expert ``name`` has ``num_images``, the others as before."""
    about = ensemble.description
    sample = about.sample
    images: dict[int | str, int] = {}  # of each cluster, by its former index or its new expert's name
    places = {}
    for expert in sorted(folders.keys() - {ROUTER}, key=expert_number):
        cluster = ensemble.places.get(expert, expert)
        if num_images is not None and cluster == ensemble.places.get(name, name):
            images[cluster] = num_images
        else:
            images[cluster] = max(1, round(ensemble.shares[expert] * about.num_images))

        places[expert] = list(images).index(cluster)

    total = sum(images.values())
    if ROUTER not in folders and STRATEGIES.get(sample.strategy).needs_router:  # type: ignore[attr-defined]
        sample = replace(sample, strategy="bayes", strategy_params={}, solver="ancestral", solver_params={})

    priors = [count / total for count in images.values()]
    manifest = checked(Path(ENSEMBLE_FILE), folders, priors, places, changed=True)
    return replace(manifest, about=replace(about, num_images=total, sample=sample))


def _require(ensemble: EnsembleManifest, name: str) -> None:
    if name not in ensemble.experts:
        raise UserError(f"{name}: no such expert; the ensemble has {', '.join(ensemble.experts)}")
