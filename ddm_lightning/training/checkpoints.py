"""Rolling checkpoints that are whole or absent, and the search for the newest one that can be read."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from ddm_lightning.files import atomic_write


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name, flushes it, then renames it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` to the local file ``path``, whole or not at all."""
        atomic_write(Path(path), lambda temporary: torch.save(checkpoint, temporary))


def rolling_checkpoints(folder: Path, every_n_steps: int, keep: int) -> ModelCheckpoint:
    """Lightning's callback, set to keep the ``keep`` newest checkpoints, named by step."""
    return ModelCheckpoint(
        dirpath=folder,
        filename="step-{step:08d}",
        auto_insert_metric_name=False,
        every_n_train_steps=every_n_steps,
        save_on_train_epoch_end=False,
        monitor="step",
        mode="max",
        save_top_k=keep,
    )


def _damage(path: Path) -> str | None:
    """Why ``path`` is no whole checkpoint, or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()  # reads all of it against its check sums
        if bad is not None:
            return f"its part {bad} fails its check sum"
        torch.load(path, map_location="meta", weights_only=True)
    except (zipfile.BadZipFile, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        return str(error).splitlines()[0]
    return None


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest readable checkpoint of a folder.

    Returns:
        Its path (None when there is none) and a line for each damaged one that was passed over; those are
        renamed to ``*.damaged``, so that a rolling save never counts them.
    """
    lines: list[str] = []
    for path in sorted(folder.glob("step-*.ckpt"), reverse=True):
        problem = _damage(path)
        if problem is None:
            return path, lines
        path.rename(path.with_suffix(".damaged"))
        lines.append(f"{path}: damaged checkpoint ({problem}); falling back to the one before it")
    return None, lines
