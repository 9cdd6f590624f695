"""Load artifacts for sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.members.artifact import ArtifactMeta, load_network, temperatures_of
from ddm_lightning.members.assembly import read_ensemble
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE


@dataclass(frozen=True)
class LoadedMember:
    """One member's network and metadata."""

    network: nn.Module
    """In evaluation mode."""
    meta: ArtifactMeta
    """Its ``member.json``."""


@dataclass(frozen=True)
class LoadedEnsemble:
    """An ensemble and the metadata that its experts share."""

    ensemble: Ensemble
    """The experts and the router."""
    meta: ArtifactMeta
    """The first expert's ``member.json``; all experts share x_shape, condition, shift and encoders."""


def load_member(folder: Path, device: torch.device | str = "cpu") -> LoadedMember:
    """Load one artifact.

    Raises:
        UserError: the artifact is damaged or unusable; see ``load_network``.
    """
    meta, network = load_network(folder)
    return LoadedMember(network.to(device), meta)


def load_single(folder: Path, device: torch.device | str = "cpu") -> LoadedEnsemble:
    """Load the monolith, or one expert alone, as an ensemble of one.

    Raises:
        UserError: as ``load_member``, or the artifact is a router.
    """
    member = load_member(folder, device)
    if member.meta.role == "router":
        raise UserError(f"{folder / MEMBER_FILE}: is a router; give an expert or the monolith")
    return LoadedEnsemble(Ensemble([member.network], None, [1.0]), member.meta)


def load_ensemble(run_dir: Path, device: torch.device | str = "cpu") -> LoadedEnsemble:
    """Load the ensemble that ``run_dir/ensemble.json`` lists.

    Raises:
        UserError: the manifest or an artifact is damaged or unusable; see ``read_ensemble``.
    """
    manifest = read_ensemble(run_dir / ENSEMBLE_FILE)
    networks = {member: load_member(folder, device).network for member, folder in manifest.folders.items()}
    router = networks.pop("router", None)
    metas = manifest.metas
    ensemble = Ensemble(
        list(networks.values()),
        router,
        manifest.priors,
        router_conditional="router" not in metas or metas["router"].condition["kind"] != "none",
        temperatures=temperatures_of(metas["router"]) if "router" in metas else ((), ()),
    )
    return LoadedEnsemble(ensemble, metas["expert-0"])
