"""The width of the weights' average, chosen after the training by the held-out loss."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout
from rich import box
from rich.progress import track
from rich.table import Table
from torch import Tensor

from ddm_lightning.config import Experiment
from ddm_lightning.core.devices import autocast, device_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_folder
from ddm_lightning.members.artifact import ArtifactMeta, build_network, read_artifact, read_meta, write_artifact
from ddm_lightning.members.member import Member
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import HELD_OUT_STEP, loss_of
from ddm_lightning.shards.manifest import Manifest
from ddm_lightning.training.ema import WIDEST
from ddm_lightning.training.ema_snapshots import FOLDER, Snapshots
from ddm_lightning.training.fit import build_data, build_module

DEFAULT_WIDTHS = (0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25)
WIDTH = "ema_width"
"""In the metrics of an artifact whose weights are an average of that width."""
_ORIGINAL = "artifact"
_ACCURACY = "held_out/accuracy"


@dataclass(frozen=True)
class Average:
    """Held-out figures of one average of a member's weights."""

    name: str
    metrics: Mapping[str, float]

    @property
    def loss(self) -> float:
        """Infinite where it is not finite at some timestep."""
        loss = loss_of(self.metrics, "held_out")
        return math.inf if loss is None else loss


class Averages:
    """The averages of one finished member, and the held-out samples by which they are compared.

    Figures are measured on one device, in the island's precision, with the same samples, times and noise for all.

    Args:
        name: a finished member, trained with ``train.ema_widths``.
        experiment: of the run.
        run: the run folder.

    Raises:
        UserError: not finished, trained on clusters that are no longer there, no snapshots, or no held-out samples.
    """

    def __init__(self, name: str, experiment: Experiment, run: RunFolder) -> None:
        self.name, self.island, self.run = name, experiment.island, run
        if not run.is_finished(name):
            raise UserError(f"{run.artifact(name)}: {name} is not finished; fit it first")
        self.meta: ArtifactMeta = read_meta(run.artifact(name))
        self.manifest = Manifest.read(run.root)
        self.member = Member.resolve(name, experiment, self.manifest)
        self.snapshots = Snapshots(run.member(name), self.member.section, self.member.train)
        if self.meta.partition_sha256 != self.manifest.partition_sha256:
            raise UserError(f"{run.artifact(name)}: was trained on clusters that have changed since; fit it anew")

    def compare(self, widths: Sequence[float] | None) -> list[Average]:
        """Figures of the artifact's weights, then of each width's; None for those of ``DEFAULT_WIDTHS`` that fit.

        Raises:
            UserError: an impossible width, a damaged snapshot, or the member is in use.
        """
        for width in widths or ():
            _check(width)
            self.snapshots.check(width)
        chosen = widths or [width for width in DEFAULT_WIDTHS if self.snapshots.fits(width)]
        now = self.meta.metrics.get(WIDTH)
        name = "of the artifact" if now is None else f"of the artifact (width {now:g})"
        weights = self._kept()
        with self._alone(), self._measuring() as measure:
            found = [Average(name, measure(weights))]
            for width in track(chosen, description=f"{self.name}: widths", transient=True):
                found.append(Average(f"width {width:g}", measure({**weights, **self.snapshots.weights(width)})))
        return found

    def use(self, width: float) -> None:
        """Replace the artifact's weights by the average of ``width``, and its held-out figures by theirs.

        The artifact of the training is kept in the member's folder ``ema``, for ``use_original``.

        Raises:
            UserError: as ``compare``.
        """
        _check(width)
        weights = {**self._kept(), **self.snapshots.weights(width)}
        with self._alone():
            with self._measuring() as measure:
                metrics = {**self.meta.metrics, **measure(weights), HELD_OUT_STEP: float(self.meta.step), WIDTH: width}
            if not self._original.exists():
                with atomic_folder(self._original) as temporary:
                    shutil.copytree(self.run.artifact(self.name), temporary, dirs_exist_ok=True)
            write_artifact(self.run.artifact(self.name), weights, replace(self.meta, metrics=metrics))

    def use_original(self) -> None:
        """Take back what ``use`` did.

        Raises:
            UserError: the artifact that the training had handed over is damaged, or the member is in use.
        """
        with self._alone():
            if not self._original.exists():
                return
            meta, weights = read_artifact(self._original)
            write_artifact(self.run.artifact(self.name), weights, meta)

    def _kept(self) -> dict[str, Tensor]:
        """Of the artifact; snapshots have parameters alone, and buffers are nothing that is averaged."""
        return read_artifact(self.run.artifact(self.name))[1]

    @property
    def _original(self) -> Path:
        return self.run.member(self.name) / FOLDER / _ORIGINAL

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within the block no other process trains the member or changes its artifact."""
        lock = FileLock(self.run.member(self.name) / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"{lock.lock_file}: {self.name} is in use by another process; wait for it") from None
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _measuring(self) -> Iterator[Callable[[Mapping[str, Tensor]], dict[str, float]]]:
        """Within the block: what gives the held-out figures of weights."""
        data = build_data(self.member, self.island, self.manifest, self.run)
        try:
            if not data.held_out_clusters:
                raise UserError(
                    f"{self.run.root}: {self.name} has no held-out samples to compare by; prepare another folder "
                    "with prepare.held_out_fraction"
                )
            data.prepare_data()
            module = build_module(self.member, self.island, self.manifest)
            module.configure_model()
            device = device_of(self.island.accelerator)
            batches = data.val_dataloader()

            def measure(weights: Mapping[str, Tensor]) -> dict[str, float]:
                # Built as an ensemble builds it, so that weights which do not fit are told as there.
                module.network.load_state_dict(build_network(self.meta, weights).state_dict())
                module.to(device).eval()
                with autocast(self.island.precision, device):
                    for index, batch in enumerate(batches):
                        module.validation_step(data.transfer_batch_to_device(batch, device, 0), index)
                return module.drain("held_out/")

            yield measure
        finally:
            data.teardown("validate")


def _check(width: float) -> None:
    if not 0 < width <= WIDEST:
        raise UserError(f"width {width:g}: is a share of the training, above 0 and at most {WIDEST:.4f}")


def widths_table(averages: Sequence[Average]) -> Table:
    """A row an average, the best held-out loss marked."""
    table = Table(box=box.SIMPLE_HEAD)
    accuracy = any(_ACCURACY in average.metrics for average in averages)
    for heading in ("average", "held-out loss", *(["accuracy"] if accuracy else []), ""):
        table.add_column(heading, justify="right" if heading else "left")
    best = min(averages, key=lambda average: average.loss)
    for average in averages:
        figures = [f"{average.loss:.5f}"]
        if accuracy:
            figures.append(f"{average.metrics.get(_ACCURACY, math.nan):.4f}")
        table.add_row(average.name, *figures, "lowest" if average is best else "")
    return table
