"""Lightning callbacks of one member: status, missed validations, rolling checkpoints, and a stop on request.

``EmaSnapshots`` comes before the callbacks that save checkpoints, and ``RollingCheckpoints`` before ``StopOnRequest``.
"""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import Any

import lightning as L
import torch
from torch.distributed import ProcessGroup

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.environment import ALONE, Ranks
from ddm_lightning.core.formatting import Bars
from ddm_lightning.core.processes import STOPPED
from ddm_lightning.members.checkpoints import TEMPORARY, checkpoints_in, step_of
from ddm_lightning.members.skipped import skipped_file
from ddm_lightning.members.status import KEPT, MemberStatus, loss_of
from ddm_lightning.training import ema
from ddm_lightning.training.checkpoint import read_trainer_state
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.parallel import BackgroundCheckpoints
from ddm_lightning.training.ranks import POLL_STEPS, report_state


class Reporter(L.Callback):
    """Keeps ``status.json`` of a ``MemberModule`` up to date, and shows the progress.

    Args:
        folder: the member's folder.
        status: written at the steps at which curves are logged.
        show: whether to show the progress.
    """

    def __init__(self, folder: Path, status: MemberStatus, *, show: bool) -> None:
        self.folder = folder
        self.status = status
        self._bars = Bars(show=show)
        self._earlier_seconds = status.seconds

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock and the bar."""
        self._first_step = trainer.global_step
        self._start = time.monotonic()
        self.status.state = "training"
        self.status.step = trainer.global_step
        self._write(trainer)
        self._bars.start()
        self._task = self._bars.add_task(self.status.member, total=self.status.max_steps, completed=trainer.global_step)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        """Report when the curves are due."""
        if module.logs_now():
            module.log_curves()
            self._report(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        """Report the last steps and remove the bar."""
        self._report(trainer, module)
        self._bars.stop()

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        """Record that training failed, or was stopped before its first step."""
        self._bars.stop()
        module.guard.write(skipped_file(self.folder, trainer.global_rank, trainer.world_size))
        if isinstance(exception, StopRequested):
            self.status.state = "stopped"
        else:
            self.status.state = "failed"

        self._write(trainer)

    def _report(self, trainer: L.Trainer, module: MemberModule) -> None:
        elapsed = time.monotonic() - self._start
        num_steps = trainer.global_step - self._first_step
        self.status.step = trainer.global_step
        self.status.seconds = self._earlier_seconds + elapsed
        if num_steps:  # a start that only makes up for a validation keeps the speed
            self.status.samples_per_second = num_steps * module.member.batch_size / elapsed

        # The gradient norm overflows in a step that 16-bit scaling skips; JSON has no infinity.
        self.status.metrics.update({name: value for name, value in module.averages.items() if math.isfinite(value)})
        self._write(trainer)
        self._bars.update(self._task, completed=trainer.global_step, note=self.status.note())

    def _write(self, trainer: L.Trainer) -> None:
        if trainer.is_global_zero:
            self.status.write(self.folder)


class MissedValidation(L.Callback):
    """Validates after the last step, and makes up for a validation that a stop or a kill cut short.

    A resumed training makes up for it before its next step. Lightning counts it as done, because the checkpoint was
    saved before it. So a training with no steps left starts, too, if it missed one.

    Args:
        folder: the member's folder.
        status: records the newest validation.
        validate_every_n_steps: steps between validations.
    """

    def __init__(self, folder: Path, status: MemberStatus, validate_every_n_steps: int) -> None:
        self.folder = folder
        self.status = status
        self.every_n_steps = validate_every_n_steps

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Lift the limit until the start: Lightning would not even start a training without steps left."""
        self._max_steps = trainer.max_steps
        trainer.fit_loop.epoch_loop.max_steps = sys.maxsize  # not -1, by which it counts epochs

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Validate if this step's validation was missed."""
        trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        # Curves after the checkpoint are discarded, so later validations are repeated. So are those that a callback's
        # state does not count.
        validated = min(self.status.validated_step, trainer.global_step)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            validated = min(validated, callback.state_dict().get("validated_step", validated))

        # Another node may not have rank zero's status.
        self.status.validated_step = trainer.strategy.broadcast(validated)
        if self.is_missed(trainer.global_step, trainer.max_steps):
            self._validate(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Validate after the last step, unless Lightning has just done so."""
        if trainer.global_step == trainer.max_steps and self.status.validated_step < trainer.max_steps:
            self._validate(trainer)

    def is_missed(self, step: int, max_steps: int) -> bool:
        """Whether a validation was due after ``step`` and missed."""
        is_due = step == max_steps or (step > 0 and step % self.every_n_steps == 0)
        return is_due and (step > self.status.validated_step or max_steps == 0)

    def _validate(self, trainer: L.Trainer) -> None:
        """Validate as Lightning does within a training, so that every callback takes part."""
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False
        trainer.validating = True
        loop.run()
        trainer.training = True

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Put the held-out averages into the status, and with them into the artifact."""
        if trainer.should_stop:  # it was cut short
            return

        self.status.metrics.update(
            (name, float(value)) for name, value in trainer.callback_metrics.items() if name.startswith("held_out/")
        )
        self.status.validated_step = trainer.global_step
        if trainer.is_global_zero:
            self.status.write(self.folder)


class BestWeights(L.Callback):
    """Keeps the averaged weights of the validation with the lowest held-out loss, for ``train.keep: best``.

    Weights are kept in the optimizer's state, and the rest here, so that checkpoints hold both. A checkpoint is saved
    before the validation of its step, so a resumed training repeats that one.

    Args:
        status: has the figures of the newest validation; ``MissedValidation`` comes before.
    """

    def __init__(self, status: MemberStatus) -> None:
        self.status = status
        self.kept: dict[str, Any] = {"validated_step": 0, "loss": math.inf, "figures": {}, "buffers": {}}

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept besides the weights, and the step of the newest validation."""
        return self.kept

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.kept = state_dict

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        """Keep the averages if they are the best, unless the validation was cut short."""
        step = trainer.global_step
        if self.status.validated_step != step:
            return

        self.kept["validated_step"] = step
        loss = loss_of(self.status.metrics, "held_out")
        if loss is not None and loss < self.kept["loss"]:
            metrics = self.status.metrics.items()
            figures = {name: value for name, value in metrics if name.startswith("held_out/")}
            figures[KEPT] = float(step)
            self.kept |= {"loss": loss, "figures": figures, "buffers": ema.kept_buffers(module.network)}
            optimizer = trainer.optimizers[0]
            for parameter, average in ema.averages_of(optimizer).items():
                optimizer.state[parameter][ema.BEST] = average.clone()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        """Put the best weights where those of the artifact are, unless every held-out loss was infinite or NaN."""
        if trainer.global_step < trainer.max_steps or not self.kept["figures"]:
            return

        for state in trainer.optimizers[0].state.values():
            if ema.BEST in state:
                state[ema.KEY] = state[ema.BEST]

        for group in trainer.optimizers[0].param_groups:
            group.pop(ema.BEHIND, None)  # they take in no later steps

        module.network.load_state_dict(self.kept["buffers"], strict=False)
        self.status.metrics |= self.kept["figures"]
        self.status.validated_step = int(self.kept["figures"][KEPT])


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
        self.folder = folder
        self.island = island
        self.origin = origin
        by_steps = None
        if not island.checkpoint_every_n_minutes:
            by_steps = island.checkpoint_every_n_steps

        self.due = [n for n in (by_steps, island.validate_every_n_steps, island.milestone_every_n_steps) if n]
        self._newest_step = -1
        self._saved_at = time.monotonic()

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Remove old checkpoints whenever a new one is written."""
        assert isinstance(trainer.strategy, BackgroundCheckpoints)
        self.strategy = trainer.strategy
        self.strategy.checkpoint_written = self.remove_old

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Save if a checkpoint is due.

        Raises:
            OSError: an earlier checkpoint could not be written.
        """
        self.strategy.checkpoints.raise_failure()
        # Also at the last step: a kill before the artifact is written then loses nothing.
        if trainer.global_step == trainer.max_steps or any(trainer.global_step % n == 0 for n in self.due):
            self.save(trainer)

    def is_late(self) -> bool:
        """Whether a checkpoint is due by this process's clock: by its interval, or the first one on a lent machine.

        That one tells how long it takes to leave.
        """
        minutes = self.island.checkpoint_every_n_minutes
        is_due = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        return is_due or (self.island.is_lent and self._newest_step < 0)

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
        self._newest_step = trainer.global_step
        self._saved_at = time.monotonic()
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step:08d}.ckpt", weights_only=False)

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Record the origin."""
        checkpoint |= self.origin

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Wait for the running save."""
        self.strategy.checkpoints.wait()

    def remove_old(self) -> None:
        """Remove all but the newest checkpoints and the milestones, also those of earlier starts."""
        for path in checkpoints_in(self.folder)[: -self.island.keep_checkpoints]:
            if not self._is_milestone(path):
                gone = path.with_name(f"{TEMPORARY}{path.name}-old")
                path.rename(gone)  # a half-removed folder would look like a damaged checkpoint
                shutil.rmtree(gone, ignore_errors=True)  # the next start tries again

    def _is_milestone(self, path: Path) -> bool:
        """Whether ``path`` is a milestone by this island's setting, or was one by the setting it was saved under."""
        try:
            recorded = read_trainer_state(path)["experiment"]["island"]["milestone_every_n_steps"]
        except (OSError, EOFError, RuntimeError, UnpicklingError, LookupError, TypeError):  # damaged
            recorded = None

        return any(n and step_of(path) % n == 0 for n in (self.island.milestone_every_n_steps, recorded))


class StopRequested(BaseException):
    """SIGTERM, SIGUSR1 or Ctrl-C outside the training steps, where there is nothing to save."""


class StopOnRequest(L.Callback):
    """On SIGTERM, SIGUSR1 (SLURM's warning) or Ctrl-C: finishes the step, saves a checkpoint and stops.

    It cuts a running validation short, except after the last step; ``RollingCheckpoints`` has saved that step before.
    Every ten steps, several ranks agree whether one of them got a signal, and whether a checkpoint is due by rank
    zero's clock (``checkpoint_every_n_minutes``).

    Args:
        checkpoints: saves them.
        mine: this process's place among the ranks.
    """

    def __init__(self, checkpoints: RollingCheckpoints, mine: Ranks = ALONE) -> None:
        self.checkpoints = checkpoints
        self.mine = mine
        self._training = False
        self._requested = False
        self._hosts: ProcessGroup | None = None

    def request(self, _number: int, _frame: FrameType | None) -> None:
        """Handle a signal; for ``processes.on_stop_signal``.

        Raises:
            StopRequested: it came outside the training steps.
        """
        if not self._training:
            # A rank: the agent ends it because another one failed, and tells why.
            raise SystemExit(STOPPED) if self.mine.agent else StopRequested

        self._requested = True

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Let no step ask the devices whether a SIGTERM came: that waits for all work queued there."""
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Let signals wait for the end of a step from here on; a collective."""
        self._training = True
        report_state(self.mine, "training")
        # Lightning has put a handler of SIGTERM in front, which calls a collective that other ranks do not. It gives
        # back the one before it after the training.
        signal.signal(signal.SIGTERM, self.request)
        if trainer.world_size > 1:
            # On the hosts, because a collective on the devices waits for their queues.
            self._hosts = torch.distributed.new_group(backend="gloo")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Save a checkpoint if one is due by time; save one and stop if asked to."""
        if self._hosts is not None and trainer.global_step % POLL_STEPS:
            return  # a collective at each step would hold up hosts that run ahead of their devices

        asked, late = self._agreed(self._requested, trainer.is_global_zero and self.checkpoints.is_late())
        if (asked or late) and not trainer.should_stop:
            self.checkpoints.save(trainer)
            if asked and trainer.global_step < trainer.max_steps:
                trainer.should_stop = True
                trainer.limit_val_batches = 0  # else Lightning validates before it stops

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """End the validation, if asked to; a collective.

        Raises:
            StopIteration: it ends here, as if there were no more held-out batches.
        """
        # Also after the last step: ranks that wait for one another drop no shard that another has yet to open.
        asked = self._agreed(self._requested)[0]
        if asked and self._training and trainer.global_step < trainer.max_steps:
            trainer.should_stop = True
        if trainer.should_stop:
            raise StopIteration

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Let signals act at once again; ``RollingCheckpoints`` has waited for the last checkpoint."""
        self._training = False

    def _agreed(self, *flags: bool) -> list[bool]:
        if self._hosts is None:
            return [*flags]

        table = torch.tensor(flags, dtype=torch.int)
        torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return [bool(flag) for flag in table.tolist()]
