"""Replay a skipped step: find the samples whose loss or gradient is not finite."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

from ddm_lightning.config.merge import island_of
from ddm_lightning.core.devices import autocast, device_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import table
from ddm_lightning.members.checkpoints import checkpoints_in, damage_of, step_of
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import lock_member
from ddm_lightning.members.skipped import SkippedStep, skipped_of
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.training.checkpoint import load_tensors
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.objective import Position, build_objective


@dataclass(frozen=True)
class ReplayedSample:
    """One sample of the step."""

    sample_id: int
    t: float
    not_finite: list[str]
    """Columns of the shards that hold a NaN or an infinity."""
    loss: float
    gradient_norm: float
    """Gradient norm of this sample's loss alone."""


def replay_step(name: str, run: Run, step: int | None, rank: int) -> tuple[SkippedStep, str, list[ReplayedSample]]:
    """Repeat a step that ``FiniteGuard`` skipped, with the same samples, timesteps, noise and dropped conditions.

    It uses the island's precision, but neither FSDP2 nor compiled blocks.

    Args:
        name: the member.
        run: its run.
        step: the step; None for the last one.
        rank: the rank whose part of the batch is replayed.

    Returns:
        The step, the path of the nearest checkpoint (or "the initial weights"), and the samples replayed with it.

    Raises:
        UserError: no such step was skipped, the shards are not those of the training, or the member is in use.
    """
    island = island_of(name, run.experiment)
    run = Run(replace(run.experiment, island=island), run.folder)
    folder = run.folder.member(name)
    skipped = _find(folder, step, rank)
    member = run.member(name)
    objective = build_objective(member, run)
    network = objective.network
    nearest = _load_nearest(network, folder / "checkpoints", skipped.step)
    if nearest is None and member.lora is None and member.initial is not None:
        member.initial.load(network)

    # The kind of device it was trained on, because each has its own random generator.
    device = device_of(island.accelerator)
    network.to(device)
    with lock_member(folder):  # a training keeps its shards in the same cache
        samples = _samples(build_data(member, run), skipped)

    batch = {name: values.to(device) for name, values in samples.items()}
    at = Position(skipped.step, skipped.rank, member.batch_size // len(skipped.sample_ids))
    noisy = objective.noisy_batch(batch, at)
    found = []
    for row, sample_id in enumerate(skipped.sample_ids):
        # One sample at a time: within a batch, zero times a neighbour's NaN is NaN.
        network.zero_grad()
        one = slice(row, row + 1)
        alone = {name: rows[one] for name, rows in batch.items()}
        objective.seed_network(at, device)
        with autocast(island.precision, device):
            loss = objective.compute_losses(noisy.rows(one), alone)["loss"].sum()

        loss.backward()
        gradients = [p.grad.double() for p in network.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        columns = [name for name, values in batch.items() if not values[row].isfinite().all()]
        found.append(ReplayedSample(sample_id, float(noisy.t[row]), columns, float(loss.detach()), norm))

    return skipped, nearest or "the initial weights", found


def _find(folder: Path, step: int | None, rank: int) -> SkippedStep:
    skipped = {one.step: one for one in skipped_of(folder) if one.rank == rank}
    chosen = max(skipped, default=None) if step is None else step
    if chosen not in skipped:
        steps = ", ".join(map(str, skipped)) or "none"
        raise UserError(f"{folder}: nothing to replay; steps of rank {rank} that were skipped: {steps}")

    return skipped[chosen]


def _load_nearest(network: nn.Module, checkpoints: Path, step: int) -> str | None:
    """Load the whole checkpoint nearest to ``step``; return its path, or None if there is none."""
    paths = sorted(checkpoints_in(checkpoints), key=lambda path: abs(step_of(path) - step))
    nearest = next((path for path in paths if damage_of(path) is None), None)
    if nearest is None:
        return None

    load_tensors(nearest, nn.ModuleDict({"network": network}))  # its name in a LightningModule
    return str(nearest)


def _samples(data: ClusterDataModule, skipped: SkippedStep) -> dict[str, Tensor]:
    """Read the samples of a step in the order of the training."""
    data.prepare_data()
    with closing(data):
        loader = data.train_dataloader()
        epoch, step = divmod(skipped.step, len(loader))
        first = step * data.batch_size
        loader.load_state_dict({"epoch": epoch, "sample_in_epoch": first, "shuffle_seed": data.seed})
        batch = next(iter(loader))

    num_ranks = data.batch_size // len(skipped.sample_ids)
    samples = {name: values[skipped.rank :: num_ranks] for name, values in batch.items()}
    if samples["sample_id"].tolist() != skipped.sample_ids:
        raise UserError(
            f"{data.shards}: step {skipped.step} has other samples here; replay where the member was trained"
        )

    return samples


def replay_table(samples: list[ReplayedSample]) -> Table:
    """Tabulate the samples, those whose gradient is not finite first."""
    columns = "no finite number in the shards"
    rows = []
    for one in sorted(samples, key=lambda sample: math.isfinite(sample.gradient_norm)):
        numbers = (f"{one.loss:.4g}", f"{one.gradient_norm:.4g}")
        rows.append((str(one.sample_id), f"{one.t:.4f}", ", ".join(one.not_finite), *numbers))

    return table(("sample", "t", columns, "loss", "gradient norm"), rows, texts=[columns])
