"""Extend a router by a cluster that came later: a new output, tuned on that cluster and a replay of the others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ddm_lightning.core.devices import device_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import Bars
from ddm_lightning.ensemble.manifest import EnsembleManifest, cluster_of, known_clusters
from ddm_lightning.members.artifact import read_artifact, write_artifact
from ddm_lightning.members.meta import ArtifactMeta, read_meta
from ddm_lightning.members.roles import ROUTER, expert_number
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import MEMBER_FILE, RunFolder, load_run
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.objective import Position, build_objective

NUM_STEPS = 500
LEARNING_RATE = 3e-3


def extend_router(
    ensemble: EnsembleManifest, expert: Path, share: float, seen: RunFolder, new: RunFolder, out: Path
) -> None:
    """Write a router that knows one more cluster; its other weights are frozen, so the other logits change little.

    Each step minimises ``(1 - share)·CE(batch of the known clusters) + share·CE(batch of the new one)``: the
    cross-entropy of the mixture. The new output starts as the mean of the others.

    Args:
        ensemble: with a router.
        expert: artifact of the expert of the new cluster.
        share: of the new cluster among all images.
        seen: run folder on whose shards the router was trained; clusters without an expert are skipped.
        new: run folder with the shards of the new cluster.
        out: artifact folder of the new router.

    Raises:
        UserError: no router, one that was extended before or has no output per cluster, several experts per cluster,
            or shards of another partition.
    """
    if ROUTER not in ensemble.folders:
        raise UserError("--tune-router: the ensemble has no router; leave the option out and use the strategy bayes")

    folder = ensemble.folders[ROUTER]
    meta, state = read_artifact(folder)
    if meta.clusters:
        raise UserError(f"{folder / MEMBER_FILE}: was extended before; train a router on the shards of all clusters")

    if max(map(expert_number, ensemble.experts)) >= meta.num_clusters:
        raise UserError(
            "--tune-router: does not go with experts by noise level; leave it out and use the strategy bayes"
        )

    run = _run_of(meta, folder, seen)
    own = read_meta(expert)
    new_run = _run_of(own, expert, new)
    present = tuple(ensemble.logits)
    member = replace(run.member(ROUTER), clusters=present, num_clusters=meta.num_clusters + 1)
    objective = build_objective(member, run)
    network = objective.network.eval()
    grown = []
    for name, parameter in network.named_parameters():
        if parameter.shape != state[name].shape:
            state[name] = torch.cat([state[name], state[name].mean(0, keepdim=True)])
            grown.append(parameter)

    if not grown or any(parameter.shape != state[name].shape for name, parameter in network.named_parameters()):
        raise UserError(f"{folder / MEMBER_FILE}: {meta.network} has no output per cluster to extend; train a router")

    network.load_state_dict(state)
    network.requires_grad_(False)
    device = device_of(run.experiment.island.accelerator)
    network.to(device)
    optimizer = torch.optim.Adam([parameter.requires_grad_() for parameter in grown], LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, NUM_STEPS)
    cluster = own.cluster
    assert cluster is not None
    num_new = min(member.batch_size, new_run.manifest.clusters[cluster].train)
    alone = replace(member, clusters=(cluster,), batch_size=num_new)
    batches = _batches(build_data(member, run)), _batches(build_data(alone, new_run))
    with Bars() as bars:
        for step in bars.track(range(NUM_STEPS), description=ROUTER):
            for side, weight in enumerate((1 - share, share)):
                batch = {name: values.to(device) for name, values in next(batches[side]).items()}
                if side:
                    batch["cluster"] = torch.full_like(batch["cluster"], meta.num_clusters)

                noisy = objective.noisy_batch(batch, Position(step, rank=side, num_ranks=2))
                (weight * objective.compute_losses(noisy, batch)["loss"].mean()).backward()

            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    clusters = [*known_clusters(meta), cluster_of(own)]
    described = replace(
        meta,
        num_clusters=len(clusters),
        clusters=clusters,
        metrics={},
        step=meta.step + NUM_STEPS,
        num_samples=meta.num_samples + NUM_STEPS * (member.batch_size + num_new),
    )
    write_artifact(out, {name: value.cpu() for name, value in network.state_dict().items()}, described)


def _run_of(meta: ArtifactMeta, artifact: Path, folder: RunFolder) -> Run:
    run = Run(load_run(folder.experiment), folder)
    if run.manifest.partition_sha256 != meta.partition_sha256:
        raise UserError(
            f"{folder.root}: holds other clusters than those of {artifact}; give the run that it was trained in"
        )

    return run


def _batches(data: ClusterDataModule) -> Iterator[dict[str, Tensor]]:
    """Training batches without end."""
    data.cache.mkdir(parents=True, exist_ok=True)
    data.prepare_data()
    loader = data.train_dataloader()
    while True:
        yield from loader
