"""Loggers by name, and the groups in which TensorBoard shows their curves."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from matplotlib.figure import Figure


class GroupingLogger(TensorBoardLogger):
    """TensorBoard with the curves in groups, what to watch first; see ``tensorboard_tag``."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log figures under their tags."""
        super().log_metrics({tensorboard_tag(name): value for name, value in metrics.items()}, step)


def tensorboard_tag(name: str) -> str:
    """Put the curve or image ``name`` into a group; TensorBoard sorts groups by the part before the first slash."""
    kind, _, figure = name.rpartition("/")
    if re.search(r"_t0\.\d+$", figure):
        return f"4_by_noise_level/{name}"
    if figure.startswith(("cross_entropy", "accuracy", "routing")):
        return f"2_router/{name}"
    if name == "samples":
        return "1_watch/train/samples"  # sorted behind the losses: each member has a card of its own
    if kind == "score" or figure == "loss":
        return f"1_watch/{name}"
    return f"3_training/{name}" if kind == "train" else name


def build_loggers(names: list[str], folder: Path, project: str, resumed_step: int) -> list[Logger]:
    """Build the loggers of a member.

    Args:
        names: ``tensorboard``, ``csv`` or ``wandb``.
        folder: the member's folder; each logger has a folder of its own in it.
        project: the project's name in Weights & Biases.
        resumed_step: step of the checkpoint to resume from; 0 for none.
    """
    loggers: list[Logger] = []
    for name in names:
        if name == "tensorboard":
            purge_step = resumed_step + 1 if resumed_step else None
            loggers.append(GroupingLogger(folder, name="", version="tensorboard", purge_step=purge_step))
        elif name == "csv":  # a file per start: the logger would overwrite that of an earlier one
            loggers.append(CSVLogger(folder / "csv", "", f"from-step-{resumed_step:08d}", flush_logs_every_n_steps=1))
        else:
            loggers.append(WandbLogger(folder.name, folder, project=project, group=folder.name))
    return loggers


def log_image(trainer: L.Trainer, name: str, image: np.ndarray[Any, Any] | Figure) -> None:
    """Show an image ``[h w 3]`` or a figure in every logger that takes images."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [image], trainer.global_step)
        elif isinstance(logger, TensorBoardLogger) and isinstance(image, Figure):
            logger.experiment.add_figure(tensorboard_tag(name), image, trainer.global_step)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image(tensorboard_tag(name), image, trainer.global_step, dataformats="HWC")
