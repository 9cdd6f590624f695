"""A step that was left out, taken once more: which of its samples is to blame, and for what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Tensor

from ddm_lightning.config import Experiment
from ddm_lightning.core.devices import autocast, device_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.member import Member
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.shards.manifest import Manifest
from ddm_lightning.shards.mds import open_shards
from ddm_lightning.training.checkpoint.files import damage_of
from ddm_lightning.training.checkpoint.rolling import checkpoints_in, step_of
from ddm_lightning.training.checkpoint.state import load_tensors
from ddm_lightning.training.fit import build_data, build_module
from ddm_lightning.training.guard import SkippedStep, skipped_of
from ddm_lightning.training.module import MemberModule


@dataclass(frozen=True)
class ReplayedSample:
    """One sample of the step."""

    sample_id: int
    t: float
    not_finite: tuple[str, ...]
    """Columns of the shards that hold numbers which are not finite."""
    loss: float
    gradient_norm: float
    """Of this sample's loss alone."""


@dataclass(frozen=True)
class Replay:
    """A step that was left out, with the weights of the nearest checkpoint."""

    skipped: SkippedStep
    weights: str
    """Which weights it was replayed with."""
    samples: list[ReplayedSample]

    def blames_none(self) -> bool:
        """Whether each sample's gradient is finite with these weights."""
        return all(math.isfinite(sample.gradient_norm) for sample in self.samples)


def replay_step(name: str, experiment: Experiment, run: RunFolder, step: int | None, rank: int) -> Replay:
    """Take a step once more that ``FiniteGuard`` left out, with the same samples, times, noise and dropped conditions.

    In the island's precision, without FSDP2 and compiled blocks.

    Args:
        name: the member.
        experiment: of the run.
        run: the run folder.
        step: which one; None for the last.
        rank: whose part of the batch.

    Raises:
        UserError: no such step was left out, or its samples are not on this machine.
    """
    skipped = _find(run.member(name), step, rank)
    manifest = Manifest.read(run.root)
    member = Member.resolve(name, experiment, manifest)
    module = build_module(member, experiment.island, manifest)
    weights = _load_nearest(module, run.member(name) / "checkpoints", skipped.step)
    # Where it was trained: the keyed draws are of a device's own generator.
    device = device_of(experiment.island.accelerator)
    module.to(device)
    samples = _samples(build_data(member, experiment.island, manifest, run), skipped)
    batch = {name: values.to(device) for name, values in samples.items()}
    module.replayed = (skipped.rank, skipped.step)
    noised = module.noised(batch)
    found = []
    for row, sample_id in enumerate(skipped.sample_ids):
        # Alone: in a batch, zero times a neighbour's NaN is NaN.
        module.zero_grad()
        one = slice(row, row + 1)
        alone = {name: rows[one] for name, rows in batch.items()}
        module.on_train_batch_start(alone, 0)  # the network's own dropout: of a batch of one, each time the same
        with autocast(experiment.island.precision, device):
            loss = module.measure(noised.rows(one), alone)["loss"].sum()
        loss.backward()
        squares = [p.grad.double().square().sum() for p in module.network.parameters() if p.grad is not None]
        norm = math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0
        columns = (name for name, rows in batch.items() if not bool(rows[row].isfinite().all()))
        found.append(ReplayedSample(sample_id, float(noised.t[row]), tuple(columns), float(loss.detach()), norm))
    return Replay(skipped, weights, found)


def _find(folder: Path, step: int | None, rank: int) -> SkippedStep:
    skipped = [one for one in skipped_of(folder) if one.rank == rank]
    if not skipped:
        raise UserError(f"{folder}: no step of rank {rank} was left out, so there is none to replay")
    chosen = [one for one in skipped if step is None or one.step == step]
    if not chosen:
        there = ", ".join(str(one.step) for one in skipped)
        raise UserError(f"{folder}: step {step} of rank {rank} was not left out; those that were: {there}")
    return max(chosen, key=lambda one: one.step)


def _load_nearest(module: MemberModule, checkpoints: Path, step: int) -> str:
    """Weights of the whole checkpoint nearest to ``step``: skipped steps change none, and others little."""
    paths = sorted(checkpoints_in(checkpoints), key=lambda path: abs(step_of(path) - step))
    nearest = next((path for path in paths if damage_of(path) is None), None)
    if nearest is None:
        return "the initial weights"
    load_tensors(nearest, module)
    return str(nearest)


def _samples(data: ClusterDataModule, skipped: SkippedStep) -> dict[str, Tensor]:
    data.prepare_data()
    folders = data.training_folders()
    shards = open_shards(folders)
    try:
        return shards.take(shards.find(np.array(skipped.sample_ids)))
    except KeyError as error:
        raise UserError(f"{folders[0]}: sample {error} is not there; replay where the member was trained") from None


def replay_table(replay: Replay) -> Table:
    """A row a sample, the ones to blame first."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("sample", "t", "not finite in the shards", "loss", "gradient norm"):
        table.add_column(heading, justify="left" if heading.startswith("not") else "right")
    for sample in sorted(replay.samples, key=lambda sample: math.isfinite(sample.gradient_norm)):
        table.add_row(
            str(sample.sample_id),
            f"{sample.t:.4f}",
            ", ".join(sample.not_finite),
            f"{sample.loss:.4g}",
            f"{sample.gradient_norm:.4g}",
        )
    return table
