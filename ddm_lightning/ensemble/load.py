"""Load artifacts for sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.manifest import EnsembleManifest, read_ensemble
from ddm_lightning.ensemble.residency import ResidentExperts
from ddm_lightning.ensemble.routing import sample, strategy_of
from ddm_lightning.ensemble.velocity import Cost, Ensemble
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.members.artifact import ArtifactMeta, load_network, temperatures_of
from ddm_lightning.members.roles import cluster_of_expert
from ddm_lightning.members.run_folder import ENSEMBLE_FILE, MEMBER_FILE


@dataclass(frozen=True)
class LoadedEnsemble:
    """An ensemble and the metadata that its experts share."""

    ensemble: Ensemble
    """The experts and the router."""
    meta: ArtifactMeta
    """The first expert's ``member.json``; all experts share x_shape, condition, shift and encoders."""

    @property
    def cost(self) -> Cost:
        """Cost of the images sampled so far."""
        return self.ensemble.cost(self.meta.x_shape, ConditionSpec.from_dict(self.meta.condition))

    def sample(
        self, settings: SampleConfig, condition: Condition | None, num: int, **more: Any
    ) -> Float[Tensor, "num c h w"]:
        """Generate ``num`` samples as a section ``sample`` says.

        Args:
            settings: strategy, solver, steps and guidance.
            condition: one per sample, or None for the null condition in all.
            num: number of samples.
            more: ``seed``, ``batch_size``, ``keys``, ``progress`` and ``trace`` of ``routing.sample``.

        Returns:
            x_0, float32, on the CPU.

        Raises:
            UserError: as ``routing.sample``.
        """
        return sample(
            self.ensemble,
            condition,
            num,
            self.meta.x_shape,
            strategy=strategy_of(settings),
            solver=settings.solver,
            solver_params=settings.solver_params,
            num_steps=settings.num_steps,
            shift=self.meta.timestep_shift,
            settings=settings,
            **more,
        )


def load_single(folder: Path, device: torch.device | str = "cpu") -> LoadedEnsemble:
    """Load the monolith, or one expert alone, as an ensemble of one.

    Raises:
        UserError: the artifact is damaged or unusable (see ``load_network``), or a router.
    """
    meta, network = load_network(folder)
    if meta.role == "router":
        raise UserError(f"{folder / MEMBER_FILE}: is a router; give an expert or the monolith")
    return LoadedEnsemble(Ensemble([network.to(device)], None, [1.0], paths=[meta.path]), meta)


class _Columns(nn.Module):
    """A router without the logits of clusters whose experts are not here; the rest renormalises exactly."""

    def __init__(self, router: nn.Module, columns: list[int]) -> None:
        super().__init__()
        self.router, self.columns = router, columns

    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        """Compute the logits of the remaining clusters, [b, K]."""
        return self.router(x_t, t, condition)[:, self.columns]


def load_ensemble(
    run_dir: Path,
    device: torch.device | str = "cpu",
    *,
    partial: bool = False,
    resident_experts: int | None = None,
) -> LoadedEnsemble:
    """Load the ensemble that ``run_dir/ensemble.json`` lists.

    Args:
        run_dir: folder of ``ensemble.json``.
        device: where to put the networks.
        partial: whether to leave out members whose artifacts are missing; see ``read_ensemble``.
        resident_experts: as in ``load_listed``.

    Raises:
        UserError: the manifest or an artifact is damaged or unusable; see ``read_ensemble``.
    """
    return load_listed(read_ensemble(run_dir / ENSEMBLE_FILE, partial=partial), device, resident_experts)


def load_listed(
    manifest: EnsembleManifest, device: torch.device | str = "cpu", resident_experts: int | None = None
) -> LoadedEnsemble:
    """Load the members of ``manifest``.

    Args:
        manifest: from ``read_ensemble``.
        device: where to put the networks.
        resident_experts: experts on the device at once (``ResidentExperts``); None is all.

    Raises:
        UserError: an artifact is damaged or unusable; see ``load_network``.
    """
    metas, folders = manifest.metas, dict(manifest.folders)
    router_folder = folders.pop("router", None)
    router = None if router_folder is None else load_network(router_folder)[1].to(device)
    takes_turns = resident_experts is not None and resident_experts < len(folders)
    networks = {name: load_network(folder, mapped=takes_turns)[1] for name, folder in folders.items()}
    experts: list[nn.Module] | ResidentExperts = list(networks.values())
    if resident_experts is not None and takes_turns:
        experts = ResidentExperts(experts, torch.device(device), resident_experts)
    else:
        experts = [network.to(device) for network in experts]
    columns = [cluster_of_expert(name) for name in networks]
    if router is not None and len(columns) < metas["router"].num_clusters:
        router = _Columns(router, columns)
    ensemble = Ensemble(
        experts,
        router,
        manifest.priors,
        paths=[metas[name].path for name in networks],
        router_conditional="router" not in metas or metas["router"].condition["kind"] != "none",
        temperatures=temperatures_of(metas["router"]) if "router" in metas else ((), ()),
    )
    ensemble.names = list(networks)
    return LoadedEnsemble(ensemble, next(iter(metas.values())))
