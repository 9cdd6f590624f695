"""Speed of a training: samples per second, MFU, data wait and memory, measured without asking the device."""

from __future__ import annotations

import resource
import sys
import time

import torch

from ddm_lightning.members.cost import UNKNOWN_COST, StepCost


class Speed:
    """Clock of a training: measures the steps since the last report, excluding validations.

    It reads the host's clock. Over the time between two reports that is the device's time too, because a report waits
    for the device.

    Args:
        samples_per_step: over all devices.
        cost: of one sample.
    """

    def __init__(self, samples_per_step: int, cost: StepCost = UNKNOWN_COST) -> None:
        self.samples_per_step, self.cost = samples_per_step, cost
        self._step_ended: float | None = None
        self.start(0)

    def start(self, step: int) -> None:
        """Start measuring after optimizer step ``step``."""
        self._began, self._first_step = time.perf_counter(), step
        self._waited = self._paused = 0.0

    def begin_wait(self) -> None:
        """Note that a step has ended: the loop waits for the next batch."""
        self._step_ended = time.perf_counter()

    def end_wait(self) -> None:
        """Note that the batch is there."""
        if self._step_ended is not None:
            self._waited += time.perf_counter() - self._step_ended

    def pause(self) -> None:
        """Stop the clock for a validation."""
        self._pause_began = time.perf_counter()

    def resume(self) -> None:
        """Restart the clock after a validation."""
        self._step_ended = time.perf_counter()
        self._paused += self._step_ended - self._pause_began

    def read(self, step: int) -> dict[str, float]:
        """Return the curves' values since the last report, and start anew; empty if no step was taken."""
        elapsed = time.perf_counter() - self._began - self._paused
        num_steps = step - self._first_step
        if num_steps <= 0 or elapsed <= 0:
            return {}
        rate = num_steps * self.samples_per_step / elapsed
        figures = {
            "train/samples_per_second": rate,
            "train/data_wait": min(1.0, self._waited / elapsed),
            "train/memory_gb": peak_memory_bytes() / 1e9,
        }
        if self.cost.peak_flops is not None:
            figures["train/mfu"] = rate * self.cost.flops / self.cost.peak_flops
            figures["train/hfu"] = rate * (self.cost.flops + self.cost.recomputed_flops) / self.cost.peak_flops
        self.start(step)
        return figures


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held: of its GPU, or of the host without one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
