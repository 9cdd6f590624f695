"""Load the members of an ensemble for sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.ensemble.residency import ResidentExperts
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.artifact import load_network, temperatures_of
from ddm_lightning.members.roles import ROUTER, cluster_of_expert


class _Columns(nn.Module):
    """A router without the logits of clusters whose experts are not here; the rest renormalises exactly."""

    def __init__(self, router: nn.Module, columns: list[int]) -> None:
        super().__init__()
        self.router, self.columns = router, columns

    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """Compute the logits of the remaining clusters, [b, K]."""
        return self.router(x_t, t, condition)[:, self.columns]


def load_ensemble(
    manifest: EnsembleManifest, device: torch.device | str = "cpu", resident_experts: int | None = None
) -> Ensemble:
    """Load the networks of ``manifest``.

    Args:
        manifest: from ``read_ensemble`` or ``single``.
        device: where to put the networks.
        resident_experts: experts on the device at once (``ResidentExperts``); None is all.

    Raises:
        UserError: an artifact is damaged or unusable; see ``load_network``.
    """
    names = manifest.experts
    takes_turns = resident_experts is not None and resident_experts < len(names)
    networks = [load_network(manifest.folders[name], mapped=takes_turns)[1] for name in names]
    experts: list[nn.Module] | ResidentExperts
    if resident_experts is not None and takes_turns:
        experts = ResidentExperts(networks, torch.device(device), resident_experts)
    else:
        experts = [network.to(device) for network in networks]
    router: nn.Module | None = None
    conditional = True
    temperatures: tuple[Sequence[float], Sequence[float]] = ((), ())
    if ROUTER in manifest.folders:
        meta, router = load_network(manifest.folders[ROUTER])
        router.to(device)
        columns = [cluster_of_expert(name) for name in names]
        if len(columns) < meta.num_clusters:
            router = _Columns(router, columns)
        conditional = meta.condition["kind"] != "none"
        temperatures = temperatures_of(meta)
    return Ensemble(
        experts,
        router,
        manifest.priors,
        names=names,
        paths=[manifest.metas[name].path for name in names],
        router_conditional=conditional,
        temperatures=temperatures,
    )
