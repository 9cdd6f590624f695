"""Lightning callbacks of one member: status and curves, disjoint ranks, a stop on request."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from rich.progress import Progress
from torch import Tensor
from torch.distributed import ProcessGroup

from ddm_lightning.core.formatting import member_columns
from ddm_lightning.core.processes import STARTED_BY, STOP_SIGNALS
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.training.checkpoint.rolling import RollingCheckpoints
from ddm_lightning.training.guard import skipped_file
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.speed import Speed

LINE_SECONDS = 60.0
POLL_STEPS = 10
"""Steps between two questions among ranks whether one was asked to stop."""


class Reporter(L.Callback):
    """Every ``every_n_steps``: averages to TensorBoard, ``status.json``, and a progress bar with an ETA.

    Where no bar is shown, a line a minute.

    This is where the host waits for the device; no other step does.
    """

    def __init__(
        self, folder: Path, status: MemberStatus, batch_size: int, every_n_steps: int, show: bool, speed: Speed
    ) -> None:
        self.folder = folder
        self.speed = speed
        self.status = status
        self.batch_size = batch_size
        self.every_n_steps = every_n_steps
        self.show = show
        self._bar: Progress | None = None
        self._earlier_seconds = status.seconds

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock and the bar."""
        self._first_step, self._start = trainer.global_step, time.monotonic()
        self._said = self._start
        self.status.state, self.status.step = "training", trainer.global_step
        if trainer.is_global_zero:
            self.status.write(self.folder)
            if self.show:
                self._bar = Progress(*member_columns())
                self._bar.start()
                self._task = self._bar.add_task(
                    self.status.member, total=self.status.max_steps, completed=trainer.global_step, note=""
                )

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Report when it is time to."""
        if trainer.global_step % self.every_n_steps == 0 or trainer.global_step == self.status.max_steps:
            self._report(trainer, module)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Log the held-out figures, and keep them for the status and the artifact; not of a validation cut short."""
        if trainer.should_stop:
            return
        held_out = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("held_out/")}
        self.status.metrics.update(held_out)
        if trainer.logger is not None:
            trainer.logger.log_metrics(held_out, step=trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Take the bar down; the training loop ended by itself or on request."""
        self._report(trainer, module)
        if self._bar is not None:
            self._bar.stop()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        """Leave the word that training failed, or was stopped before its first step."""
        if self._bar is not None:
            self._bar.stop()
        self._write_skipped(trainer, module)
        self.status.state = "stopped" if isinstance(exception, StopRequested) else "failed"
        if trainer.is_global_zero:
            self.status.write(self.folder)

    def _write_skipped(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, MemberModule)
        module.guard.write(skipped_file(self.folder, trainer.global_rank, trainer.world_size))

    def _report(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        assert isinstance(module, MemberModule)
        module.guard.settle()
        self._write_skipped(trainer, module)
        averages = module.drain("train/")
        if averages:
            averages["train/skipped_steps"] = module.guard.num_skipped
        elapsed = time.monotonic() - self._start
        steps = trainer.global_step - self._first_step
        self.status.step = trainer.global_step
        self.status.seconds = self._earlier_seconds + elapsed
        if steps:  # a start that only makes up for a validation leaves the speed as it was
            self.status.samples_per_second = steps * self.batch_size / elapsed if elapsed > 0 else 0.0
        # A norm may overflow in a step that 16-bit scaling then skips; JSON knows no infinity.
        self.status.metrics.update({name: value for name, value in averages.items() if math.isfinite(value)})
        if not trainer.is_global_zero:
            return
        if averages and trainer.logger is not None:
            rates = {
                "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
                **self.speed.read(trainer.global_step),
            }
            trainer.logger.log_metrics({**averages, **rates}, step=trainer.global_step)
        self.status.write(self.folder)
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.global_step, note=self.status.note())
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._say(trainer.global_step)

    def _say(self, step: int) -> None:
        """A line for a job's log."""
        self._said = time.monotonic()
        print(
            f"{self.status.member}: step {step:,} of {self.status.max_steps:,}  {self.status.note()}", file=sys.stderr
        )


class MissedValidation(L.Callback):
    """Validates after the last step, and makes up for a validation that a stop or a kill has cut short.

    After a resume that comes before the next step. Lightning counts it as taken, because the checkpoint is older than
    its first batch. Last among the callbacks, so that the others are ready for it, and that what they do with its end
    is done.

    Args:
        folder: the member's.
        status: knows the newest validation.
        validate_every_n_steps: when it is validated.
    """

    def __init__(self, folder: Path, status: MemberStatus, validate_every_n_steps: int) -> None:
        self.folder, self.status, self.every_n_steps = folder, status, validate_every_n_steps

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Add the last validation; have a training whose steps have all been taken start and end."""
        loop, train = trainer.fit_loop, trainer.fit_loop.run
        epoch, is_due = loop.epoch_loop, loop.epoch_loop._should_check_val_fx

        def run() -> None:
            loop.setup_data()
            if loop.done:
                loop.on_run_start()
                loop.on_run_end()
            else:
                train()

        def is_due_or_last(fetcher: Any) -> bool:
            return is_due(fetcher) or (trainer.global_step == trainer.max_steps and epoch._should_check_val_epoch())

        loop.run = run  # type: ignore[method-assign]
        epoch._should_check_val_fx = is_due_or_last  # type: ignore[method-assign, assignment]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Validate now if that was due; every rank has read the same status."""
        step = trainer.global_step
        is_due = step == trainer.max_steps or (step > 0 and step % self.every_n_steps == 0)
        if not is_due or step <= self.status.validated_step:
            return
        loop = trainer.fit_loop.epoch_loop.val_loop
        loop.restarting = False
        trainer.validating = True
        loop.run()
        trainer.training = True

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Remember one that was not cut short."""
        if not trainer.should_stop:
            self.status.validated_step = trainer.global_step
            if trainer.is_global_zero:
                self.status.write(self.folder)


class DisjointRanks(L.Callback):
    """Stops the run when two ranks received the same sample in the first batch (Lightning #20140)."""

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Compare the first batch's sample ids over all ranks."""
        if trainer.world_size == 1 or getattr(self, "_checked", False):
            return
        self._checked = True
        gathered = [torch.empty_like(batch["sample_id"]) for _ in range(trainer.world_size)]
        torch.distributed.all_gather(gathered, batch["sample_id"])
        ids = torch.cat(gathered)
        if len(torch.unique(ids)) != len(ids):
            raise RuntimeError("ranks stream the same samples: RANK and LOCAL_WORLD_SIZE did not reach Streaming")


class SampleLog(L.Callback):
    """Writes each step's sample ids to a text file, a line a step: proof of what was trained on.

    The file is ``sample_ids.txt``, or with several devices ``sample_ids-0.txt`` and so on, one a rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        """Append ``step: ids``."""
        name = "sample_ids.txt" if trainer.world_size == 1 else f"sample_ids-{trainer.global_rank}.txt"
        with (self.folder / name).open("a", encoding="utf-8") as stream:
            stream.write(f"{trainer.global_step}: {' '.join(str(i) for i in batch['sample_id'].tolist())}\n")


class StopRequested(BaseException):
    """SIGTERM, SIGUSR1 or Ctrl-C outside of the training steps, where there is nothing to save."""


class StopOnRequest(L.Callback):
    """SIGTERM, SIGUSR1 (SLURM's warning) or Ctrl-C: finish the step, leave a checkpoint, stop.

    A validation is cut short, as its step has a checkpoint already (``RollingCheckpoints``), but not the last one, with
    which training is over. Several ranks agree every ten steps whether they stop. Those that the first one started
    leave signals to it all the time: a terminal sends them to all, and one that stopped while it starts would be waited
    for by the others.
    """

    def __init__(self, checkpoints: RollingCheckpoints) -> None:
        self.checkpoints = checkpoints
        self.stopped = False
        self._training = False
        self._requested = False
        self._hosts: ProcessGroup | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block these signals come here, except in ranks that the first one started.

        Raises:
            StopRequested: one came while no steps were being taken.
        """
        self._previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN if STARTED_BY in os.environ else self._request)
        try:
            yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        if not self._training:
            raise StopRequested
        self._requested = True

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Keep Lightning from taking SIGTERM, at which it calls a collective that the other ranks do not.

        And from asking at each step on the devices whether one came: the hosts would wait for all that is queued there.
        """
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """From here on a signal is for the end of a step; a collective."""
        self._training = True
        if trainer.world_size > 1:
            # On the hosts: on the devices it would wait for their queues at each step.
            self._hosts = torch.distributed.new_group(backend="gloo")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        """Leave a checkpoint where the rolling ones are taken too, then stop."""
        if self._hosts is not None and trainer.global_step % POLL_STEPS:
            return  # a collective at each step would hold up hosts that run ahead of their devices
        if self._agreed() and not self.stopped:
            self.checkpoints.save(trainer)
            if trainer.global_step < trainer.max_steps:
                self.stopped = trainer.should_stop = True
                trainer.limit_val_batches = 0  # Lightning validates before it stops; who resumes here does not

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """End the validation if it is to end."""
        if self.cuts_validation(trainer):
            raise StopIteration  # as held-out batches do that come to their end

    def cuts_validation(self, trainer: L.Trainer) -> bool:
        """Whether the validation that is under way is to end here; a collective: every rank asks."""
        if self._training and trainer.global_step < trainer.max_steps and self._agreed():
            self.stopped = trainer.should_stop = True
        return trainer.should_stop

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """No more steps to finish; one more signal does not end what is being written."""
        self.checkpoints.on_train_end(trainer, module)
        self._training = False

    def _agreed(self) -> bool:
        if self._hosts is None:
            return self._requested
        flag = torch.tensor(int(self._requested))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return bool(flag)
