"""How fast a member trains: what the host sees between two reports, without asking the device for anything."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from ddm_lightning.core.devices import peak_of_this_device


@dataclass(frozen=True)
class StepCost:
    """Work of one training sample, and what the devices could do."""

    flops: float
    """Forward and backward, a multiply-add is two; without what is computed twice to save memory."""
    recomputed_flops: float
    """What activation checkpointing computes once more."""
    peak_flops: float | None
    """Of all devices of the member, a second; None where it is unknown, then there is neither MFU nor HFU."""

    @classmethod
    def of(
        cls, flops: float, recomputed_flops: float, accelerator: str, precision: str, num_devices: int
    ) -> tuple[StepCost, str]:
        """With the peak of this process's device, and a line that names it."""
        name, peak = peak_of_this_device(accelerator, precision)
        line = f"{flops / 1e9:.4g} GFLOP a sample"
        if peak is None:
            return cls(flops, recomputed_flops, None), f"{line}; the peak of {name} is not known, so no MFU is shown"
        line += f"; MFU against {num_devices} x {peak:g} TFLOP/s of {name} in {precision}"
        return cls(flops, recomputed_flops, num_devices * peak * 1e12), line


UNKNOWN_COST = StepCost(0.0, 0.0, None)


class Speed(L.Callback):
    """Samples a second, MFU, HFU, data wait and memory since the last report; has to be the last callback.

    Time in validation, with its pictures, does not count. Wall-clock time is the host's: over an interval it is the
    device's too, because a report waits for it.
    """

    def __init__(self, samples_a_step: int, cost: StepCost) -> None:
        self.samples_a_step, self.cost = samples_a_step, cost
        self._waited = self._paused = 0.0
        self._step_ended: float | None = None

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Start the clock."""
        self._begin(trainer.global_step)

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch is there."""
        if self._step_ended is not None:
            self._waited += time.perf_counter() - self._step_ended

    def on_train_batch_end(self, *_: Any) -> None:
        """From here on the loop waits for a batch."""
        self._step_ended = time.perf_counter()

    def on_validation_start(self, *_: Any) -> None:
        """Stop the clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        """Go on."""
        self._step_ended = time.perf_counter()
        self._paused += self._step_ended - self._validation_began

    def read(self, step: int) -> dict[str, float]:
        """The figures since the last call, in TensorBoard's names; empty if no step was taken."""
        elapsed = time.perf_counter() - self._began - self._paused
        num_steps = step - self._first_step
        if num_steps <= 0 or elapsed <= 0:
            return {}
        rate = num_steps * self.samples_a_step / elapsed
        figures = {
            "train/samples_per_second": rate,
            "train/data_wait": min(1.0, self._waited / elapsed),
            "train/memory_gb": peak_memory_bytes() / 1e9,
        }
        if self.cost.peak_flops is not None:
            figures["train/mfu"] = rate * self.cost.flops / self.cost.peak_flops
            figures["train/hfu"] = rate * (self.cost.flops + self.cost.recomputed_flops) / self.cost.peak_flops
        self._begin(step)
        return figures

    def _begin(self, step: int) -> None:
        self._began, self._first_step = time.perf_counter(), step
        self._waited = self._paused = 0.0


def peak_memory_bytes() -> int:
    """The most that this process has held: of its GPU, or of the host's memory without one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
