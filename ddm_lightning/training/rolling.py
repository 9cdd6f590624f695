"""Rolling checkpoints: when to save, which to keep, and which one a training resumes from."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L

from ddm_lightning.config.experiment import Experiment, IslandConfig
from ddm_lightning.core.devices import resolve_accelerator
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run_folder import refuse_changes
from ddm_lightning.training.checkpoint import TEMPORARY, damage_of, read_rest
from ddm_lightning.training.guard import skipped_file
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.parallel import BackgroundCheckpoints

_NAME = re.compile(r"step-\d{8,}\.ckpt")
# Island settings that change the rounding; the first two also change the noise.
_NUMERICS = (
    *("accelerator", "devices", "strategy", "precision", "micro_batch_size"),
    *("attention", "compile", "activation_checkpointing"),
)


class RollingCheckpoints(L.Callback):
    """Save at the island's interval, before each validation, after the last step and on request.

    Saving before a validation allows a stop at any moment of it. Writing happens in the background. ``StopOnRequest``
    asks for the saves by time, because ranks must agree on their steps.

    Lightning's ``ModelCheckpoint`` delays saves to the next validation (2.6), and after a kill forgets files of earlier
    starts.

    Args:
        folder: the member's checkpoints, named by step.
        island: intervals of saves, validations and milestones (kept for good), and the number of others to keep.
        origin: recorded in each checkpoint, for ``check_origin``.
    """

    def __init__(self, folder: Path, island: IslandConfig, origin: Mapping[str, Any]) -> None:
        self.folder, self.keep, self.origin = folder, island.keep_checkpoints, origin
        self.milestone_every_n_steps = island.milestone_every_n_steps
        self.every_n_minutes = island.checkpoint_every_n_minutes
        by_steps = None if self.every_n_minutes else island.checkpoint_every_n_steps
        self.due = [n for n in (by_steps, island.validate_every_n_steps, self.milestone_every_n_steps) if n]
        self._newest_step, self._saved_at = -1, time.monotonic()

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Remove old checkpoints whenever a new one is written."""
        _strategy(trainer).checkpoint_written = self.remove_old

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Save if a checkpoint is due.

        Raises:
            OSError: an earlier checkpoint could not be written.
        """
        _strategy(trainer).checkpoints.raise_failure()
        # Also at the last step: a kill before the artifact is written then loses nothing.
        if trainer.global_step == trainer.max_steps or any(trainer.global_step % n == 0 for n in self.due):
            self.save(trainer)

    def is_late(self) -> bool:
        """Whether the newest checkpoint is older than ``checkpoint_every_n_minutes`` by this process's clock."""
        return self.every_n_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_n_minutes

    def save(self, trainer: L.Trainer) -> None:
        """Save this step, once; a collective of all ranks.

        Raises:
            UserError: the training diverged; earlier checkpoints stay.
            OSError: an earlier checkpoint could not be written.
        """
        if trainer.global_step == self._newest_step:
            return
        assert isinstance(trainer.lightning_module, MemberModule)
        guard = trainer.lightning_module.guard
        guard.find_skipped()
        # Write now: a training resumed here does not repeat the steps skipped before.
        guard.write(skipped_file(self.folder.parent, trainer.global_rank, trainer.world_size))
        self._newest_step, self._saved_at = trainer.global_step, time.monotonic()
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step:08d}.ckpt", weights_only=False)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record the origin."""
        checkpoint |= self.origin

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Wait for the running save."""
        _strategy(trainer).checkpoints.wait()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Wait for the running save and ignore its errors; ``exception`` is the one to show."""
        writer = getattr(trainer.strategy, "checkpoints", None)  # absent before the strategy is set up
        if writer is not None:
            writer.wait_after_failure()

    def remove_old(self) -> None:
        """Remove all but the newest checkpoints and the milestones, also those of earlier starts."""
        for path in checkpoints_in(self.folder)[: -self.keep]:
            if not self._is_milestone(path):
                gone = path.with_name(f"{TEMPORARY}{path.name}-old")
                path.rename(gone)  # a half-removed folder would look like a damaged checkpoint
                shutil.rmtree(gone, ignore_errors=True)  # the next start tries again

    def _is_milestone(self, path: Path) -> bool:
        """Whether ``path`` is a milestone by this island's setting, or was one by the setting it was saved under."""
        try:
            recorded = read_rest(path)["experiment"]["island"]["milestone_every_n_steps"]
        except (OSError, EOFError, RuntimeError, UnpicklingError, LookupError, TypeError):  # damaged
            recorded = None
        return any(n and step_of(path) % n == 0 for n in (self.milestone_every_n_steps, recorded))


def _strategy(trainer: L.Trainer) -> BackgroundCheckpoints:
    assert isinstance(trainer.strategy, BackgroundCheckpoints)
    return trainer.strategy


def checkpoints_in(folder: Path) -> list[Path]:
    """A member's checkpoints by step; other files and folders, such as copies, are ignored."""
    return sorted((path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Optimizer steps taken before the checkpoint ``path``."""
    return int(path.stem.removeprefix("step-"))


def newest_checkpoint(folder: Path) -> Path | None:
    """A member's newest checkpoint, which may be damaged; None if there is none."""
    return next(reversed(checkpoints_in(folder)), None)


def find_resumable(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest readable checkpoint in ``folder``, and the problems of newer ones; changes nothing.

    Raises:
        UserError: all checkpoints are damaged.
    """
    problems: dict[Path, str] = {}
    for path in reversed(checkpoints_in(folder)):
        problem = damage_of(path)
        if problem is None:
            return path, problems
        problems[path] = problem
    if problems:
        newest, problem = next(iter(problems.items()))
        others = f", nor the {len(problems) - 1} before it" if len(problems) > 1 else ""
        raise UserError(
            f"{newest}: damaged checkpoint ({problem}){others}; restore one, or remove {folder} to start afresh"
        )
    return None, problems


def tidy(folder: Path, damaged: Iterable[Path]) -> None:
    """Remove what a killed process left half-written; rename the checkpoints ``damaged``, of which the oldest is kept.

    The caller holds the member's lock, so no other process writes here.
    """
    for unfinished in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    for path in damaged:
        for earlier in folder.glob("*.damaged"):
            shutil.rmtree(earlier, ignore_errors=True)
        path.rename(path.with_suffix(".damaged"))


def origin_of(member: str, experiment: Experiment) -> dict[str, Any]:
    """Name of a member and its experiment as plain values, which load with ``weights_only``."""
    record = asdict(experiment)
    record["island"]["accelerator"] = resolve_accelerator(experiment.island.accelerator)
    return {"member": member, "experiment": record}


def check_origin(path: Path, member: str, experiment: Experiment) -> str | None:
    """Describe island settings that differ from the checkpoint's; None if none that matters does.

    A checkpoint may have been copied, and the experiment changed since.

    Raises:
        UserError: the checkpoint is another member's or of another experiment.
    """
    rest, own = read_rest(path), origin_of(member, experiment)
    if rest.get("member") != member:
        raise UserError(
            f"{path}: is a checkpoint of {rest.get('member')}, not of {member}; move it to that folder, or remove it"
        )
    refuse_changes(path, rest["experiment"], own["experiment"])
    old, new = rest["experiment"]["island"], own["experiment"]["island"]
    if not (differing := [name for name in _NUMERICS if old.get(name) != new[name]]):
        return None
    settings = ", ".join(f"island.{name}={_in_yaml(new[name])} (was {_in_yaml(old.get(name))})" for name in differing)
    noise = "noise and " if {"accelerator", "devices"} & {*differing} else ""
    return f"from here on with {settings}: the same samples, other {noise}rounding"


def _in_yaml(value: str | float | None) -> str:
    """``value`` as typed after ``key=``."""
    return value if isinstance(value, str) else json.dumps(value)
