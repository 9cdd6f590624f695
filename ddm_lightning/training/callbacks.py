"""Lightning callbacks of one member: status, missed validations, and a stop on request.

Their order does not matter: none relies on another one's hook having run before its own.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from rich.progress import Progress
from torch.distributed import ProcessGroup

from ddm_lightning.core.formatting import member_columns
from ddm_lightning.core.processes import STOPPED, handling
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.training.guard import skipped_file
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.ranks import has_agent
from ddm_lightning.training.rolling import RollingCheckpoints

LINE_SECONDS = 60.0
POLL_STEPS = 10
"""Steps after which ranks ask one another whether one was told to stop."""


class Reporter(L.Callback):
    """Keeps ``status.json`` of a ``MemberModule`` up to date; shows a progress bar or prints a line per minute.

    Args:
        folder: the member's folder.
        status: written at the steps at which curves are logged.
        show: whether to show a progress bar.
    """

    def __init__(self, folder: Path, status: MemberStatus, show: bool) -> None:
        self.folder = folder
        self.status = status
        self.show = show
        self._bar: Progress | None = None
        self._earlier_seconds = status.seconds

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock and the bar."""
        self._first_step = trainer.global_step
        self._start = self._printed = time.monotonic()
        self.status.state, self.status.step = "training", trainer.global_step
        if trainer.is_global_zero:
            self.status.write(self.folder)
            if self.show:
                self._bar = Progress(*member_columns())
                self._bar.start()
                self._task = self._bar.add_task(
                    self.status.member, total=self.status.max_steps, completed=trainer.global_step, note=""
                )

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        """Report when the curves are due."""
        if module.logs_now():
            module.log_curves()
            self._report(trainer, module)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        """Report the last steps and remove the bar."""
        self._report(trainer, module)
        self._stop_bar()

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        """Record that training failed, or was stopped before its first step."""
        self._stop_bar()
        self._write_skipped(trainer, module)
        self.status.state = "stopped" if isinstance(exception, StopRequested) else "failed"
        if trainer.is_global_zero:
            self.status.write(self.folder)

    def _report(self, trainer: L.Trainer, module: MemberModule) -> None:
        self._write_skipped(trainer, module)
        elapsed = time.monotonic() - self._start
        num_steps = trainer.global_step - self._first_step
        self.status.step = trainer.global_step
        self.status.seconds = self._earlier_seconds + elapsed
        if num_steps:  # a start that only makes up for a validation keeps the speed
            self.status.samples_per_second = num_steps * module.member.batch_size / elapsed if elapsed > 0 else 0.0
        # The gradient norm overflows in a step that 16-bit scaling skips; JSON has no infinity.
        self.status.metrics.update({name: value for name, value in module.averages.items() if math.isfinite(value)})
        if not trainer.is_global_zero:
            return
        self.status.write(self.folder)
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step, note=self.status.note())
        elif time.monotonic() - self._printed >= LINE_SECONDS:
            self._printed = time.monotonic()
            steps = f"step {trainer.global_step:,} of {self.status.max_steps:,}"
            print(f"{self.status.member}: {steps}  {self.status.note()}", file=sys.stderr)

    def _write_skipped(self, trainer: L.Trainer, module: MemberModule) -> None:
        module.guard.write(skipped_file(self.folder, trainer.global_rank, trainer.world_size))

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class MissedValidation(L.Callback):
    """Validates after the last step, and makes up for a validation that a stop or a kill cut short.

    A resumed training makes up for it before its next step. Lightning counts it as done, because the checkpoint was
    saved before it. A training with no steps left starts for this reason, too.

    Args:
        folder: the member's folder.
        status: records the newest validation.
        validate_every_n_steps: steps between validations.
    """

    def __init__(self, folder: Path, status: MemberStatus, validate_every_n_steps: int) -> None:
        self.folder, self.status, self.every_n_steps = folder, status, validate_every_n_steps

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Lift the limit until the start: Lightning would not even start a training without steps left."""
        self._max_steps = trainer.max_steps
        trainer.fit_loop.epoch_loop.max_steps = sys.maxsize  # not -1, by which it counts epochs

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Validate if this step's validation was missed."""
        trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        # Curves after the checkpoint are discarded, so later validations are repeated.
        self.status.validated_step = min(self.status.validated_step, trainer.global_step)
        if self.is_missed(trainer.global_step, trainer.max_steps):
            self._validate(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Validate after the last step, unless Lightning has just done so."""
        if trainer.global_step == trainer.max_steps and self.status.validated_step < trainer.max_steps:
            self._validate(trainer)

    def is_missed(self, step: int, max_steps: int) -> bool:
        """Whether a validation was due after ``step`` and missed; every rank has read the same status."""
        is_due = step == max_steps or (step > 0 and step % self.every_n_steps == 0)
        return is_due and step > self.status.validated_step

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
        held_out = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("held_out/")}
        self.status.metrics.update(held_out)
        self.status.validated_step = trainer.global_step
        if trainer.is_global_zero:
            self.status.write(self.folder)


class StopRequested(BaseException):
    """SIGTERM, SIGUSR1 or Ctrl-C outside the training steps, where there is nothing to save."""


class StopOnRequest(L.Callback):
    """On SIGTERM, SIGUSR1 (SLURM's warning) or Ctrl-C: finishes the step, saves a checkpoint and stops.

    It cuts a running validation short, whose step ``RollingCheckpoints`` has saved, except after the last step. Several
    ranks agree every ten steps whether to stop, so that it is enough if one of them gets the signal, and whether a
    checkpoint is due by rank zero's clock (``checkpoint_every_n_minutes``).
    """

    def __init__(self, checkpoints: RollingCheckpoints) -> None:
        self.checkpoints = checkpoints
        self.stopped = False
        self._is_listening = False
        self._training = False
        self._requested = False
        self._hosts: ProcessGroup | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle these signals within the returned context.

        Raises:
            StopRequested: a signal came outside the training steps.
        """
        self._is_listening = True
        with handling(self._request):
            yield

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if not self._training:
            # A rank: the agent ends it because another one failed, and tells why.
            raise SystemExit(STOPPED) if has_agent() else StopRequested
        self._requested = True

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Let no step ask the devices whether a SIGTERM came: that waits for all work queued there."""
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Let signals wait for the end of a step from here on; a collective."""
        self._training = True
        if self._is_listening:
            # Lightning has put a handler of SIGTERM in front, which calls a collective that other ranks do not.
            signal.signal(signal.SIGTERM, self._request)
        if trainer.world_size > 1:
            # On the hosts, because a collective on the devices waits for their queues.
            self._hosts = torch.distributed.new_group(backend="gloo")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Save a checkpoint if one is due by time; save one and stop if asked to."""
        if self._hosts is not None and trainer.global_step % POLL_STEPS:
            return  # a collective at each step would hold up hosts that run ahead of their devices
        asked, late = self._agreed(self._requested, trainer.is_global_zero and self.checkpoints.is_late())
        if (asked or late) and not self.stopped:
            self.checkpoints.save(trainer)
            if asked and trainer.global_step < trainer.max_steps:
                self.stopped = trainer.should_stop = True
                trainer.limit_val_batches = 0  # else Lightning validates before it stops

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """End the validation, if asked to; a collective.

        Raises:
            StopIteration: it ends here, as if there were no more held-out batches.
        """
        if self._training and trainer.global_step < trainer.max_steps and self._agreed(self._requested)[0]:
            self.stopped = trainer.should_stop = True
        if trainer.should_stop:
            raise StopIteration

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Let signals act at once again, after the last checkpoint is written."""
        self.checkpoints.on_train_end(trainer, module)
        self._training = False

    def _agreed(self, *flags: bool) -> list[bool]:
        if self._hosts is None:
            return [*flags]
        table = torch.tensor(flags, dtype=torch.int)
        torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return [bool(flag) for flag in table.tolist()]
