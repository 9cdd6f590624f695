"""Snapshots of power-function averages on disk, and weights of any width made of them."""

from __future__ import annotations

import re
from pathlib import Path

import lightning as L
import torch
from torch import Tensor

from ddm_lightning import checks
from ddm_lightning.config import TrainConfig
from ddm_lightning.errors import UserError
from ddm_lightning.files import atomic_write_json, read_json
from ddm_lightning.training.ema import gathered_ema, width_key
from ddm_lightning.training.ema_profiles import Snapshot, shares
from ddm_lightning.training.module import MemberModule
from ddm_lightning.weights import load_weights, save_weights

FOLDER = "ema"
_INDEX = "snapshots.json"
_NAME = re.compile(r"width-(0\.\d+)-step-(\d{8,})\.safetensors")
_REMEDY = "remove that folder and artifact/, then train the member again"


def snapshot_steps(train: TrainConfig) -> list[int]:
    """Optimizer steps after which averages are written: equal distances, the last step among them."""
    return sorted(
        {round(train.max_steps * part / train.ema_snapshots) for part in range(1, train.ema_snapshots + 1)} - {0}
    )


class EmaSnapshots(L.Callback):
    """Writes the averages of ``train.ema_widths``, float32, to the member's folder ``ema``."""

    def __init__(self, folder: Path, train: TrainConfig) -> None:
        self.folder = folder / FOLDER
        self.widths = train.ema_widths
        self.steps = frozenset(snapshot_steps(train))

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: object) -> None:
        """Write when it is time to; a resumed training writes what it passes once more, to the same bytes."""
        if trainer.global_step not in self.steps:
            return
        assert isinstance(module, MemberModule)
        for width in self.widths:
            weights = gathered_ema(module.network, trainer.optimizers[0], width_key(width))
            if trainer.is_global_zero:
                name = _name(Snapshot(width, trainer.global_step))
                sha256 = save_weights(self.folder / name, weights, str(self.folder / name))
                atomic_write_json(self.folder / _INDEX, {**_read_index(self.folder), name: sha256})


def _name(snapshot: Snapshot) -> str:
    return f"width-{snapshot.width:g}-step-{snapshot.step:08d}.safetensors"


def _snapshot(name: str) -> Snapshot:
    found = _NAME.fullmatch(name)
    assert found is not None  # _read_index has looked
    return Snapshot(float(found[1]), int(found[2]))


def _read_index(folder: Path) -> dict[str, str]:
    path = folder / _INDEX
    if not path.exists():
        return {}
    index = read_json(path, "the list of snapshots", _REMEDY)
    is_hash = checks.SHA256[0]
    if not isinstance(index, dict) or not all(_NAME.fullmatch(name) and is_hash(index[name]) for name in index):
        raise UserError(f"{path}: is no list of snapshots and their hashes; {_REMEDY}")
    return index


class Snapshots:
    """The snapshots of one member.

    Args:
        folder: the member's.

    Raises:
        UserError: there are none, or their list is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self._sha256 = _read_index(self.folder)
        if not self._sha256:
            raise UserError(
                f"{self.folder}: no snapshots of averages; train with key 'train.ema_widths', such as [0.05, 0.1]"
            )
        self._listed = {_snapshot(name): name for name in sorted(self._sha256)}
        self.step = max(snapshot.step for snapshot in self._listed)
        """The last one's."""

    def weights(self, width: float) -> dict[str, Tensor]:
        """Weights averaged over the whole training with any ``width``, float32; memory is that of two copies.

        Raises:
            UserError: a snapshot is missing or damaged.
        """
        listed = list(self._listed)
        total: dict[str, Tensor] = {}
        for snapshot, share in zip(listed, shares(listed, width, self.step), strict=True):
            name = self._listed[snapshot]
            state = load_weights(self.folder / name, self._sha256[name], _REMEDY)
            for key, value in state.items():
                total[key] = torch.add(total.get(key, torch.zeros_like(value)), value, alpha=float(share))
        return total
