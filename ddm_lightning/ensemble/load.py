"""Load the networks of an ensemble's manifest."""

from __future__ import annotations

import torch
from torch import nn

from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.ensemble.residency import ResidentExperts
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.members.load import Bases, load_network
from ddm_lightning.members.meta import temperatures_of
from ddm_lightning.members.roles import ROUTER


def load_ensemble(
    manifest: EnsembleManifest, device: torch.device | str = "cpu", resident_experts: int | None = None
) -> Ensemble:
    """Load the networks of ``manifest``.

    Args:
        manifest: from ``read_ensemble`` or ``single``.
        device: where to put the networks.
        resident_experts: experts on the device at once (``ResidentExperts``); None is all. Experts that are adapters
            share their base on the device, so all of them count as one.

    Raises:
        UserError: an artifact is damaged or unusable; see ``load_network``.
    """
    names = manifest.experts
    num_large = len({manifest.metas[name].base_sha256 or name for name in names})
    num_resident = min(resident_experts or num_large, num_large)
    takes_turns = num_resident < num_large
    bases = Bases(manifest.folders.values(), "cpu" if takes_turns else device)
    networks = []
    for name in names:
        _, network = load_network(manifest.folders[name], mapped=takes_turns, bases=bases)
        networks.append(network if takes_turns else network.to(device))

    router: nn.Module | None = None
    if ROUTER in manifest.folders:
        _, router = load_network(manifest.folders[ROUTER])
        router.to(device)

    # Nothing reads these without a router.
    of_router = manifest.metas.get(ROUTER, manifest.meta)
    metas = [manifest.metas[name] for name in names]
    return Ensemble(
        ResidentExperts(networks, torch.device(device), num_resident) if takes_turns else networks,
        router,
        manifest.priors,
        names=names,
        expert_clusters=list(manifest.places.values()),
        clusters=manifest.logits,
        intervals=[meta.interval for meta in metas],
        class_counts=manifest.class_counts,
        paths=[meta.path for meta in metas],
        router_conditional=of_router.condition.kind != "none",
        temperatures=temperatures_of(of_router),
    )
