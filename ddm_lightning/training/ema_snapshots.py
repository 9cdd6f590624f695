"""Snapshots of power-function averages on disk, and weights of any width made of them."""

from __future__ import annotations

import re
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from ddm_lightning.config import TrainConfig
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, read_json
from ddm_lightning.core.weights import load_weights, save_weights
from ddm_lightning.training.ema import Mixture, Snapshot, gathered_ema, mixture, width_key
from ddm_lightning.training.module import MemberModule

FOLDER = "ema"
LARGEST_MISFIT = 0.05
_INDEX = "snapshots.json"
_NAME = re.compile(r"width-(0\.\d+)-step-(\d{8,})\.safetensors")


def snapshot_steps(train: TrainConfig) -> list[int]:
    """Optimizer steps after which averages are written: equal distances, the last step among them."""
    num = train.ema_snapshots
    return sorted({round(train.max_steps * part / num) for part in range(1, num + 1)} - {0})


class EmaSnapshots(L.Callback):
    """Writes the averages of ``train.ema_widths``, float32, to the member's folder ``ema``."""

    def __init__(self, folder: Path, train: TrainConfig) -> None:
        self.folder = folder / FOLDER
        self.widths = train.ema_widths
        self.steps = frozenset(snapshot_steps(train))
        self._sha256: dict[str, str] = {}
        self._written_step = -1

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Go on with the list of an earlier start."""
        self._sha256 = _read_index(self.folder)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        """Write the averages when they are due; a resumed training repeats those of its steps, byte by byte."""
        self._write(trainer, module)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, object]) -> None:
        """Write them before the checkpoint, so that a training that resumes from it has them."""
        self._write(trainer, module)

    def _write(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step not in self.steps - {self._written_step}:
            return
        self._written_step = trainer.global_step
        assert isinstance(module, MemberModule)
        for width in self.widths:
            weights = gathered_ema(
                module.network, trainer.optimizers[0], width_key(width), keeps=trainer.is_global_zero
            )
            if trainer.is_global_zero:
                name = _name(Snapshot(width, trainer.global_step))
                self._sha256[name] = save_weights(self.folder / name, weights, str(self.folder / name))
                atomic_write_json(self.folder / _INDEX, self._sha256)


def _name(snapshot: Snapshot) -> str:
    return f"width-{snapshot.width:g}-step-{snapshot.step:08d}.safetensors"


def _remedy(folder: Path) -> str:
    return f"remove {folder.parent}, then train the member again"


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / _INDEX
    if not path.exists():
        return {}
    index = read_json(path, "the list of snapshots", _remedy(folder))
    is_hash = checks.SHA256[0]
    if not isinstance(index, dict) or not all(_NAME.fullmatch(name) and is_hash(index[name]) for name in index):
        raise UserError(f"{path}: is no list of snapshots and their hashes; {_remedy(folder)}")
    return index


def missing_snapshots(folder: Path, train: TrainConfig, step: int) -> str | None:
    """A line of those that a training which goes on at ``step`` should have in the member's ``folder``, and has not.

    None where all are there. Training goes on without them, but no width can be chosen behind it.

    Raises:
        UserError: their list is damaged.
    """
    known = _read_index(folder / FOLDER) if train.ema_widths else {}
    due = [_name(Snapshot(width, at)) for width in train.ema_widths for at in snapshot_steps(train) if at <= step]
    missing = [name for name in due if name not in known or not (folder / FOLDER / name).is_file()]
    if not missing:
        return None
    return (
        f"{len(missing)} of the {len(due)} snapshots of averages that were due are missing, such as "
        f"{folder / FOLDER / missing[0]}; stop and put them back with {_INDEX}, or the command ema refuses this member "
        "(where max_steps was raised, they are of other steps, and it does)"
    )


class Snapshots:
    """The snapshots of one finished member.

    Args:
        folder: the member's.
        section: of the experiment that describes it, ``expert`` or ``router``, for error lines.
        train: how it was trained.

    Raises:
        UserError: none are kept, or one is missing.
    """

    def __init__(self, folder: Path, section: str, train: TrainConfig) -> None:
        self.folder = folder / FOLDER
        if not train.ema_widths:
            raise UserError(
                f"key '{section}.train.ema_widths' is empty, so {folder} has no averages to choose from; train in "
                f"another folder (run_dir=…) with {section}.train.ema_widths=[0.05,0.1]"
            )
        self._sha256 = _read_index(self.folder)
        self.step = train.max_steps
        """The last one's."""
        self._all = [Snapshot(width, step) for width in train.ema_widths for step in snapshot_steps(train)]
        for snapshot in self._all:
            if _name(snapshot) not in self._sha256:
                raise UserError(f"{self.folder / _name(snapshot)}: this snapshot is missing; {_remedy(self.folder)}")

    def fits(self, width: float) -> bool:
        """Whether the snapshots make an average of ``width`` to ``LARGEST_MISFIT``."""
        return self._mixture(width).misfit <= LARGEST_MISFIT

    def check(self, width: float) -> None:
        """Refuse a ``width`` that the snapshots do not fit.

        Raises:
            UserError: the snapshots make no such average.
        """
        misfit = self._mixture(width).misfit
        if misfit > LARGEST_MISFIT:
            raise UserError(
                f"width {width:g}: snapshots of {sorted({snapshot.width for snapshot in self._all})} miss its profile "
                f"by {misfit:.0%}; choose one that is nearer to theirs, or train in "
                "another folder (run_dir=…) with more ema_snapshots"
            )

    def _mixture(self, width: float) -> Mixture:
        return mixture(self._all, width, self.step)

    def weights(self, width: float) -> dict[str, Tensor]:
        """Weights averaged over the whole training with any ``width``, float32; memory is that of two copies.

        Raises:
            UserError: the snapshots make no such average, or one of them is missing or damaged.
        """
        self.check(width)
        shares = self._mixture(width).shares
        total: dict[str, Tensor] = {}
        for snapshot, share in zip(self._all, shares, strict=True):
            name = _name(snapshot)
            state = load_weights(self.folder / name, self._sha256[name], _remedy(self.folder))
            for key, value in state.items():
                total[key] = torch.add(total.get(key, torch.zeros_like(value)), value, alpha=float(share))
        return total
