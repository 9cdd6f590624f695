"""Choose the width of the averaged weights after training, by held-out loss."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from rich.table import Table
from torch import Tensor

from ddm_lightning.core.devices import autocast, device_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_folder
from ddm_lightning.core.formatting import Bars, table
from ddm_lightning.core.weights import load_weights
from ddm_lightning.members.artifact import read_artifact, write_artifact
from ddm_lightning.members.load import build_network
from ddm_lightning.members.meta import ArtifactMeta
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import lock_member
from ddm_lightning.members.signatures import sign_artifact
from ddm_lightning.members.status import HELD_OUT_STEP, KEPT, loss_of
from ddm_lightning.networks.lora import frozen
from ddm_lightning.training import ema
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.objective import Position, build_objective
from ddm_lightning.training.parallel import apply_island

DEFAULT_WIDTHS = (0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25)
LARGEST_MISFIT = 0.05
WIDTH = "ema_width"
"""Metric of an artifact whose weights are an average of this width."""
_ACCURACY = "held_out/accuracy"


def mixture(snapshots: Sequence[ema.Snapshot], width: float, step: int) -> tuple[Float[np.ndarray, " n"], float]:
    """Mix snapshots into an average of another ``width`` at ``step``, by least squares of profiles.

    This is EDM2's algorithm 3 (2312.02696), but the shares are constrained to sum to 1 and not scaled afterwards.

    Inner products of profiles are integrals over continuous time.

    Returns:
        Share of each snapshot, float64; shares sum to 1, and some are negative.
        The misfit: the relative L2 error of the mixed profile.
    """
    exponents = np.array([ema.exponent_of(snapshot.width) for snapshot in snapshots])
    steps = np.array([snapshot.step for snapshot in snapshots], dtype=np.float64)
    wanted = np.array(ema.exponent_of(width))
    last = np.array(float(step))
    products = _products(exponents[:, None], steps[:, None], exponents[None], steps[None])
    aims = _products(exponents, steps, wanted, last)
    # Neighbouring profiles are nearly equal: a diagonal of ones loses the fewest digits.
    scale = np.sqrt(np.diagonal(products))
    # A Lagrange multiplier makes the shares sum to 1; otherwise they would scale the weights.
    border = scale.min() / scale
    system = np.block([[products / np.outer(scale, scale), border[:, None]], [border[None], np.zeros((1, 1))]])
    shares = np.linalg.lstsq(system, np.append(aims / scale, scale.min()), rcond=1e-14)[0][:-1] / scale
    squared_norm = float(_products(wanted, last, wanted, last))
    squared_error = squared_norm - 2 * shares @ aims + shares @ products @ shares
    return shares, float(np.sqrt(max(0.0, squared_error) / squared_norm))


def _products(
    a: Float[np.ndarray, "*n"],
    step_a: Float[np.ndarray, "*n"],
    b: Float[np.ndarray, "*n"],
    step_b: Float[np.ndarray, "*n"],
) -> Float[np.ndarray, "*m"]:
    """Inner products ∫ p_a p_b dτ of profiles p(τ) = (γ + 1) τ^γ / t^(γ + 1), τ ≤ t (EDM2, eq. 151)."""
    earlier = np.minimum(step_a, step_b)
    # Powers of ratios, because powers of steps overflow.
    overlap = (earlier / step_a) ** a * (earlier / step_b) ** b * earlier / (step_a * step_b)
    return (a + 1) * (b + 1) / (a + b + 1) * overlap


class EmaWidths:
    """Averages of one finished member, compared on its held-out samples.

    All are measured on one device, in the island's precision, with the same samples, times and noise.

    Args:
        name: a finished member, trained with ``train.ema_widths``.
        run: its run.

    Raises:
        UserError: the member is unfinished, its clusters have changed, or snapshots are missing.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self.folder = run.folder.member(name)
        self.artifact = run.folder.artifact(name)
        if not run.folder.has_artifact(name):
            raise UserError(f"{self.artifact}: {name} is not finished; fit it first")

        self.meta, self.weights = read_artifact(self.artifact)
        self.member = run.member(name)
        self._ema = self.folder / ema.FOLDER
        self._original = self._ema / "artifact"
        self._remedy = ema.snapshots_remedy(self._ema)
        if not self.member.train.ema_widths:
            raise UserError(
                f"key '{self.member.role.section}.train.ema_widths' is empty: no averages to choose from; "
                "train in another run_dir=…"
            )

        self._sha256 = ema.read_index(self._ema)
        # A training that ended early has the first of them.
        self._all = [one for one in ema.all_snapshots(self.member.train) if one.step <= self.meta.step]
        if not self._all:
            raise UserError(f"{self.artifact}: {name} has ended before its first snapshot; leave its average")

        self._last = self._all[-1].step
        if self.meta.partition_sha256 != run.manifest.partition_sha256:
            raise UserError(f"{self.artifact}: was trained on clusters that have changed since; fit it again")

    def compare(self, widths: Sequence[float] | None) -> dict[str, dict[str, float]]:
        """Measure held-out figures of the artifact's weights, then of each width's.

        Args:
            widths: None for those of ``DEFAULT_WIDTHS`` that fit.

        Raises:
            UserError: an impossible width, a damaged snapshot, no held-out samples, or the member is in use.
        """
        for width in widths or ():
            self._shares(width)

        chosen = widths or [w for w in DEFAULT_WIDTHS if mixture(self._all, w, self._last)[1] <= LARGEST_MISFIT]
        name = "of the artifact"
        if WIDTH in self.meta.metrics:
            name += f" (width {self.meta.metrics[WIDTH]:g})"

        with lock_member(self.folder), Bars(transient=True) as bars:
            averages = (
                (f"width {width:g}", self._averaged(width))
                for width in bars.track(chosen, description=f"{self.name}: widths")
            )
            return self._measured(itertools.chain([(name, self.weights)], averages))

    def use(self, width: float | None) -> None:
        """Make the average of ``width`` the artifact's weights, with held-out figures of that average.

        The original artifact is kept in the member's folder ``ema``. None restores it.

        Raises:
            UserError: as ``compare``, or the original artifact is damaged.
        """
        with lock_member(self.folder):
            if width is not None:
                weights = self._averaged(width)
                (figures,) = self._measured([("", weights)]).values()
                found = {**figures, HELD_OUT_STEP: float(self.meta.step), WIDTH: width}
                if not self._original.exists():
                    with atomic_folder(self._original) as temporary:
                        shutil.copytree(self.artifact, temporary, dirs_exist_ok=True)

                metrics = {**self.meta.metrics, **found}
                metrics.pop(KEPT, None)
                self._write(weights, replace(self.meta, metrics=metrics))
            elif self._original.exists():
                meta, weights = read_artifact(self._original)
                self._write(weights, meta)

    def _write(self, weights: Mapping[str, Tensor], meta: ArtifactMeta) -> None:
        write_artifact(self.artifact, weights, meta, partial(sign_artifact, name=self.name, run=self.run))

    def _shares(self, width: float) -> Float[np.ndarray, " n"]:
        """Share of each snapshot in the average of ``width``.

        Raises:
            UserError: no profile has this width, or its misfit exceeds ``LARGEST_MISFIT``.
        """
        shares, misfit = mixture(self._all, width, self._last)
        if misfit > LARGEST_MISFIT:
            raise UserError(
                f"width {width:g}: the snapshots miss its profile by {misfit:.0%}; "
                "choose a width nearer to train.ema_widths, or train in another run_dir=… with more ema_snapshots"
            )

        return shares

    def _averaged(self, width: float) -> dict[str, Tensor]:
        """The artifact's weights, but parameters averaged with any ``width``, float32; buffers stay.

        Raises:
            UserError: as ``_shares``, or a snapshot is missing or damaged.
        """
        total: dict[str, Tensor] = {}
        for snapshot, share in zip(self._all, self._shares(width), strict=True):
            state = load_weights(self._ema / snapshot.file, self._sha256.get(snapshot.file, ""), self._remedy)
            for key, value in state.items():
                total[key] = torch.add(total.get(key, torch.zeros_like(value)), value, alpha=float(share))

        return {**self.weights, **total}

    def _measured(self, candidates: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, float]]:
        """Held-out figures of weights, by name."""
        found = {}
        with closing(build_data(self.member, self.run)) as data:
            if not data.held_out_clusters:
                raise UserError(
                    f"{self.run.folder.root}: {self.name} has no held-out samples; prepare anew with held_out_fraction"
                )

            data.prepare_data()
            objective = build_objective(self.member, self.run)
            network = objective.network
            island = self.run.experiment.island
            apply_island(network, island)
            device = device_of(island.accelerator)
            batches = data.val_dataloader()
            for name, weights in candidates:
                # Built as in an ensemble, so that weights that do not fit give the same error.
                network.load_state_dict(build_network(self.meta, weights, frozen(network)).state_dict())
                network.to(device).eval()
                objective.start_validation()
                with autocast(island.precision, device):
                    for index, batch in enumerate(batches):
                        on_device = data.transfer_batch_to_device(batch, device, 0)
                        objective.validate(on_device, index, Position(self.meta.step))

                found[name] = objective.held_out_figures()

        return found


def widths_table(averages: Mapping[str, Mapping[str, float]]) -> Table:
    """Table of the figures from ``EmaWidths.compare``, with the lowest held-out loss marked."""
    losses = {name: loss_of(metrics, "held_out") or math.inf for name, metrics in averages.items()}
    lowest = min(losses.values())
    titles = ["average", "held-out loss", ""]
    rows = []
    for name, metrics in averages.items():
        rows.append([name, f"{losses[name]:.5f}", "lowest" if losses[name] == lowest else ""])
        if _ACCURACY in metrics:
            rows[-1].insert(2, f"{metrics[_ACCURACY]:.4f}")
            titles = ["average", "held-out loss", "accuracy", ""]

    return table(titles, rows)
