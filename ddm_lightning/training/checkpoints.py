"""Rolling checkpoints that are whole or absent, and the search for the newest one that can be read."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from ddm_lightning.files import atomic_write
from ddm_lightning.schema import first_line
from ddm_lightning.training.module import MemberModule

_FULL_BYTES = 1 << 20


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name, flushes it, then renames it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Save ``checkpoint`` to the local file ``path``, whole or not at all.

        Raises:
            OSError: the disk is full, or fails.
        """

        def write(temporary: Path) -> None:
            try:
                torch.save(checkpoint, temporary)
            except RuntimeError as error:  # of torch's own writer, which does not say why
                is_full = shutil.disk_usage(temporary.parent).free < _FULL_BYTES
                number = errno.ENOSPC if is_full else errno.EIO
                raise OSError(number, os.strerror(number), str(path)) from error

        atomic_write(Path(path), write)


class RollingCheckpoints(Checkpoint):
    """Saves every ``every_n_steps`` steps and keeps the ``keep`` newest checkpoints, named by step.

    It saves before each validation, too, so that one may be cut short at any moment.

    Lightning's own callback, told to keep a few, puts a save off until the next validation (2.6), and after
    a kill it knows only the files that the checkpoint it resumed from had recorded.
    """

    def __init__(self, folder: Path, every_n_steps: int, keep: int, validate_every_n_steps: int) -> None:
        self.folder = folder
        self.validate_every_n_steps = validate_every_n_steps
        self.every_n_steps = every_n_steps
        self.keep = keep
        self._newest_step = -1

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Save when it is time to."""
        if trainer.global_step % self.every_n_steps == 0 or trainer.global_step % self.validate_every_n_steps == 0:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Save this step, once, and remove what is too old; a collective: every rank calls it.

        Raises:
            UserError: training diverged; what is kept are checkpoints from before.
        """
        if trainer.global_step == self._newest_step:
            return
        assert isinstance(trainer.lightning_module, MemberModule)
        trainer.lightning_module.guard.settle()
        self._newest_step = trainer.global_step
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step:08d}.ckpt", weights_only=False)
        if trainer.is_global_zero:
            for path in sorted(self.folder.glob("step-*.ckpt"))[: -self.keep]:
                path.unlink()


def damage_of(path: Path) -> str | None:
    """Why ``path`` is no whole checkpoint, or None."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()  # reads all of it against its check sums
        if bad is not None:
            return f"its part {bad} fails its check sum"
        torch.load(path, map_location="meta", weights_only=True)
    except (zipfile.BadZipFile, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        return first_line(error)
    return None


def newest_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest readable checkpoint of a folder.

    Returns:
        Its path (None when there is none) and a line for each damaged one that was passed over; those are
        renamed to ``*.damaged``, so that a rolling save never counts them.
    """
    for unfinished in folder.glob(".tmp-*"):  # of a killed process: the member's lock says that no other is alive
        unfinished.unlink(missing_ok=True)
    lines: list[str] = []
    paths = sorted(folder.glob("step-*.ckpt"), reverse=True)
    for path in paths:
        problem = damage_of(path)
        if problem is None:
            return path, lines
        with contextlib.suppress(FileNotFoundError):  # another rank was first
            path.rename(path.with_suffix(".damaged"))
        next_best = "starting afresh" if path == paths[-1] else "falling back to the one before it"
        lines.append(f"{path}: damaged checkpoint ({problem}); {next_best}")
    return None, lines
