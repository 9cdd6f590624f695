"""The width of the weights' average, chosen after the training by the held-out loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ddm_lightning.artifacts import read_artifact, read_meta, write_artifact
from ddm_lightning.config import Experiment
from ddm_lightning.errors import UserError
from ddm_lightning.loading.datamodule import ClusterDataModule
from ddm_lightning.members import config_of
from ddm_lightning.prepare.manifest import Manifest
from ddm_lightning.run_folder import RunFolder
from ddm_lightning.training.devices import resolve_accelerator
from ddm_lightning.training.ema_profiles import WIDEST
from ddm_lightning.training.ema_snapshots import Snapshots
from ddm_lightning.training.fit import build_data, build_module
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.status import MemberStatus

DEFAULT_WIDTHS = (0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25)
_WIDTH = "ema_width"


@dataclass(frozen=True)
class Average:
    """Held-out figures of one average of a member's weights."""

    width: float | None
    """None for what the artifact holds."""
    metrics: Mapping[str, float]


def compare_widths(
    member: str, experiment: Experiment, run: RunFolder, widths: Sequence[float] | None = None
) -> list[Average]:
    """Held-out figures of the artifact's weights, then of each width's.

    Args:
        member: a finished one, trained with ``train.ema_widths``.
        experiment: of the run.
        run: the run folder.
        widths: which to compare; None for ``DEFAULT_WIDTHS``.

    Raises:
        UserError: not finished, no snapshots or damaged ones, no held-out samples here, or an impossible width.
    """
    for width in widths or ():
        _check(width)
    snapshots = _snapshots(member, run)
    manifest = Manifest.read(run.root)
    module = build_module(member, experiment, manifest)
    module.configure_model()
    data = build_data(member, experiment, manifest, run)
    data.prepare_data()
    device = torch.device("cuda" if resolve_accelerator(experiment.island.accelerator) == "gpu" else "cpu")
    try:
        found = [Average(None, _held_out(module, read_artifact(run.artifact(member))[1], data, device))]
        if not found[0].metrics:
            raise UserError(f"{run.root}: {member} has no held-out samples here; prepare with a held_out_fraction")
        for width in track(widths or DEFAULT_WIDTHS, description=f"{member}: widths", transient=True):
            found.append(Average(width, _held_out(module, snapshots.weights(width), data, device)))
    finally:
        data.teardown("validate")
    return found


def hand_over_width(member: str, experiment: Experiment, run: RunFolder, width: float) -> None:
    """Replace the weights of a member's artifact by the average of ``width``, and its held-out figures by theirs.

    Raises:
        UserError: as ``compare_widths``.
    """
    metrics = dict(compare_widths(member, experiment, run, [width])[-1].metrics) | {_WIDTH: width}
    meta = read_meta(run.artifact(member))
    weights = _snapshots(member, run).weights(width)
    write_artifact(run.artifact(member), weights, replace(meta, metrics={**meta.metrics, **metrics}))
    status = MemberStatus.read(run.member(member), member, config_of(member, experiment).train.max_steps)
    status.metrics.update(metrics)
    status.write(run.member(member))


def _check(width: float) -> None:
    if not 0 < width <= WIDEST:
        raise UserError(f"width {width:g}: is a share of the training, above 0 and at most {WIDEST:.3f}")


def _snapshots(member: str, run: RunFolder) -> Snapshots:
    if not run.is_finished(member):
        raise UserError(f"{run.artifact(member)}: {member} is not finished; fit it first")
    return Snapshots(run.member(member))


def _held_out(
    module: MemberModule, weights: Mapping[str, Tensor], data: ClusterDataModule, device: torch.device
) -> dict[str, float]:
    module.network.load_state_dict(dict(weights))
    module.to(device).eval()
    for index, batch in enumerate(data.val_dataloader()):
        module.validation_step(data.transfer_batch_to_device(batch, device, 0), index)
    return module.drain("held_out/")


def widths_table(averages: Sequence[Average]) -> Table:
    """A row an average, the best held-out loss marked."""
    table = Table(box=box.SIMPLE_HEAD)
    accuracy = "held_out/accuracy" in averages[0].metrics
    for heading in ("average", "held-out loss", *(["accuracy"] if accuracy else []), ""):
        table.add_column(heading, justify="right" if heading else "left")
    best = min(averages, key=lambda average: average.metrics["held_out/loss"])
    for average in averages:
        name = "of the artifact" if average.width is None else f"width {average.width:g}"
        figures = [f"{average.metrics['held_out/loss']:.5f}"]
        if accuracy:
            figures.append(f"{average.metrics['held_out/accuracy']:.4f}")
        table.add_row(name, *figures, "lowest" if average is best else "")
    return table
