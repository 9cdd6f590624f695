"""The monolith that an ensemble is held against: the same network on all clusters, trained with the members' FLOPs."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.artifact import read_meta
from ddm_lightning.members.member import (
    MONOLITH,
    Member,
    batch_size,
    ensemble_members,
)
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.networks.flops import flops_per_sample
from ddm_lightning.shards.manifest import Manifest
from ddm_lightning.training.fit import fit_member


@dataclass(frozen=True)
class Budget:
    """Training FLOPs, forward and backward, of what was trained: measured per sample, times the samples seen."""

    members: dict[str, float]
    """Of each member of the ensemble."""
    monolith_step: float
    """Of one step of the monolith."""

    @property
    def ensemble(self) -> float:
        """Of the whole ensemble, the router included."""
        return sum(self.members.values())

    @property
    def monolith_steps(self) -> int:
        """Steps after which the monolith has cost as much."""
        return max(1, round(self.ensemble / self.monolith_step))


def budget(experiment: Experiment, run: RunFolder) -> Budget:
    """What the finished ensemble of ``run`` has cost, by its artifacts."""
    manifest = Manifest.read(run.root)
    return Budget(
        {
            member: _flops_of_sample(member, experiment, manifest) * read_meta(run.artifact(member)).num_samples
            for member in ensemble_members(experiment)
        },
        _flops_of_sample(MONOLITH, experiment, manifest) * batch_size(MONOLITH, experiment),
    )


def monolith_flops(experiment: Experiment, run: RunFolder) -> float:
    """Training FLOPs of the finished monolith, by its artifact."""
    num_samples = read_meta(run.artifact(MONOLITH)).num_samples
    return _flops_of_sample(MONOLITH, experiment, Manifest.read(run.root)) * num_samples


def check_monolith(run: RunFolder, num_steps: int) -> None:
    """Refuse a monolith that somebody trained for another number of steps, wholly or in part.

    Raises:
        UserError: the line names its folder.
    """
    folder = run.member(MONOLITH)
    planned = MemberStatus.read(folder, MONOLITH, num_steps).max_steps
    if planned != num_steps:
        raise UserError(
            f"{folder}: this monolith trains for {planned} steps, equal FLOPs need {num_steps}; "
            "move the folder away, and the benchmark trains another"
        )


def fit_monolith(experiment: Experiment, run: RunFolder, num_steps: int) -> None:
    """Train the monolith in this process, from its newest checkpoint if there is one.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; it left a checkpoint.
    """
    longer = copy.deepcopy(experiment)
    longer.expert.train.max_steps = num_steps
    if fit_member(MONOLITH, longer, run, show_progress=True).state == "stopped":
        raise KeyboardInterrupt


def _flops_of_sample(member: str, experiment: Experiment, manifest: Manifest) -> float:
    resolved = Member.resolve(member, experiment, manifest)
    return flops_per_sample(resolved.build_network(), manifest.x_shape, resolved.condition, backward=True)
