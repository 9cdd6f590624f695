"""Rolling checkpoints, and the search for the newest one that can be read."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import lightning as L

from ddm_lightning.core.errors import UserError
from ddm_lightning.training.checkpoint.files import TEMPORARY, damage_of
from ddm_lightning.training.checkpoint.origin import was_milestone
from ddm_lightning.training.guard import skipped_file
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.parallel.strategies import BackgroundCheckpoints

_NAME = re.compile(r"step-\d{8,}\.ckpt")


class RollingCheckpoints(L.Callback):
    """Saves every ``every_n_steps`` steps, before each validation, behind the last step and on request; named by step.

    They are written in the background. One before each validation lets that be cut short at any moment.

    Lightning's own callback, told to keep a few, puts a save off until the next validation (2.6), and after
    a kill it knows only the files that the checkpoint it resumed from had recorded. And a ``Checkpoint`` is put behind
    all other callbacks, of which the one that takes the time has to be the last.

    Args:
        folder: of the member's checkpoints, in its own.
        every_n_steps: between two of them.
        keep: the newest so many are kept,
        milestone_every_n_steps: and each one of a multiple of so many steps; None for no new ones.
        validate_every_n_steps: when it is validated.
    """

    def __init__(
        self,
        folder: Path,
        every_n_steps: int,
        keep: int,
        validate_every_n_steps: int,
        milestone_every_n_steps: int | None = None,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.milestone_every_n_steps = milestone_every_n_steps
        self.due = [n for n in (every_n_steps, validate_every_n_steps, milestone_every_n_steps) if n is not None]
        self._newest_step = -1
        self._milestones: set[int] = set()

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Too old ones are removed once a new one is there."""
        _strategy(trainer).checkpoint_written = self.remove_old

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Save when it is time to.

        Raises:
            OSError: an earlier one could not be written.
        """
        _strategy(trainer).checkpoints.raise_failure()
        # The last one, too: a member that is killed while it hands over loses nothing.
        if trainer.global_step == trainer.max_steps or any(trainer.global_step % n == 0 for n in self.due):
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Save this step, once; a collective: every rank calls it.

        Raises:
            UserError: training diverged; what is kept are checkpoints from before.
            OSError: an earlier one could not be written.
        """
        if trainer.global_step == self._newest_step:
            return
        assert isinstance(trainer.lightning_module, MemberModule)
        guard = trainer.lightning_module.guard
        guard.settle()
        # Now, not with the next report: whoever resumes here does not take the steps before it once more.
        guard.write(skipped_file(self.folder.parent, trainer.global_rank, trainer.world_size))
        self._newest_step = trainer.global_step
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step:08d}.ckpt", weights_only=False)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Wait for the one that is being written."""
        _strategy(trainer).checkpoints.wait()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Wait for it here, too; the exception at hand is the one to show."""
        writer = getattr(trainer.strategy, "checkpoints", None)  # none before the strategy is set up
        if writer is not None:
            writer.wait_after_failure()

    def remove_old(self) -> None:
        """Remove all but the newest few and the milestones, those of earlier starts among them."""
        for path in checkpoints_in(self.folder)[: -self.keep]:
            if not self._is_milestone(path):
                gone = path.with_name(f"{TEMPORARY}{path.name}-old")
                path.rename(gone)  # half of a folder would pass for a damaged checkpoint
                shutil.rmtree(gone, ignore_errors=True)  # the next start looks again

    def _is_milestone(self, path: Path) -> bool:
        step = step_of(path)
        if step in self._milestones:
            return True
        is_own = self.milestone_every_n_steps is not None and step % self.milestone_every_n_steps == 0
        if is_own or was_milestone(path, step):
            self._milestones.add(step)
            return True
        return False


def _strategy(trainer: L.Trainer) -> BackgroundCheckpoints:
    assert isinstance(trainer.strategy, BackgroundCheckpoints)
    return trainer.strategy


def checkpoints_in(folder: Path) -> list[Path]:
    """Those of a member, by their steps; what else lies there, such as a copy that somebody made, is none."""
    return sorted((path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Optimizer steps before the checkpoint at ``path``."""
    return int(path.stem.removeprefix("step-"))


def newest_checkpoint(folder: Path, *, leads: bool = True) -> tuple[Path | None, list[str]]:
    """The newest readable checkpoint of a folder.

    Args:
        folder: of the member's checkpoints.
        leads: whether this process is the first of its member; others take what it has left, so they come later.

    Returns:
        Its path (None when there is none) and a line for each damaged one that was passed over; the oldest of those is
        kept as ``*.damaged``, which no rolling save counts.

    Raises:
        UserError: an older version wrote it, or none of several can be read; all stay as they are.
    """
    if not leads:
        return next(reversed(checkpoints_in(folder)), None), []
    # Of a killed process: the member's lock says that no other is alive.
    for unfinished in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    problems: dict[Path, str] = {}
    for path in reversed(checkpoints_in(folder)):
        if path.is_file():
            raise UserError(
                f"{path}: an older version wrote this checkpoint, and this one reads folders; finish the member with "
                f"that version, or remove {folder} to start it afresh"
            )
        problem = damage_of(path)
        if problem is None:
            return path, [_set_aside(damaged, why) for damaged, why in problems.items()]
        problems[path] = problem
    if problems:
        newest, problem = next(iter(problems.items()))
        others = f", nor the {len(problems) - 1} before it" if len(problems) > 1 else ""
        raise UserError(
            f"{newest}: damaged checkpoint ({problem}){others}; restore one, or remove {folder} to start the member "
            "afresh"
        )
    return None, []


def _set_aside(path: Path, problem: str) -> str:
    """Keep a damaged checkpoint for whoever looks into it, in place of one that was kept before; the line of it."""
    for earlier in path.parent.glob("*.damaged"):
        shutil.rmtree(earlier, ignore_errors=True)
    path.rename(path.with_suffix(".damaged"))
    return f"{path}: damaged checkpoint ({problem}); falling back to the one before it"
