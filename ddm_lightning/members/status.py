"""Status of one member's training, a small JSON file that others may read at any time."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from ddm_lightning.core import checks
from ddm_lightning.core.errors import note
from ddm_lightning.core.files import atomic_write_json
from ddm_lightning.core.formatting import format_duration
from ddm_lightning.core.processes import start_time

HELD_OUT_STEP = "held_out/step"
KEPT = "kept_step"
"""Metric of an artifact: step at which its other held-out figures were measured."""
TEMPERATURE_METRIC = "held_out/temperature"
"""Metrics of a router that start with this are its temperatures by t, which sampling applies."""
CONDITIONAL = "_conditional"
"""Ends the names of a router's figures with the condition."""
STATES = ("waiting", "starting", "training", "stopped", "failed", "done")


def loss_of(metrics: Mapping[str, float], split: str) -> float | None:
    """Loss of the split ``train`` or ``held_out``: an expert's, or a router's cross-entropy."""
    return metrics.get(f"{split}/cross_entropy", metrics.get(f"{split}/loss"))


@dataclass
class MemberStatus:
    """Progress of one member's training."""

    member: checks.Text
    """Its name."""
    max_steps: checks.Count
    """Optimizer steps to take."""
    state: Annotated[str, checks.one_of(STATES)] = "waiting"
    """One of ``STATES``; ``stopped`` means on request."""
    step: checks.Count = 0
    """Optimizer steps taken."""
    seconds: checks.Amount = 0.0
    """Training time, summed over restarts."""
    samples_per_second: checks.Amount = 0.0
    """Training samples per second since the last start, over all devices."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest logged averages."""
    validated_step: checks.Count = 0
    """Step of the newest complete validation."""
    pid: checks.Count = 0
    """Process that trains the member."""
    began: str = ""
    """Start of that process, in ticks of its machine's clock; empty if unknown."""
    host: str = ""
    """Name of that machine."""
    device: str = ""
    """Its devices, such as ``8 x NVIDIA H100 80GB HBM3``; empty if unknown."""
    updated: checks.Amount = 0.0
    """Unix time of the last write."""

    def write(self, folder: Path) -> None:
        """Write ``status.json`` in the member's folder; of several ranks, only the first may."""
        self.updated = time.time()
        self.pid = os.getpid()
        self.began = start_time(self.pid)
        self.host = platform.node()
        try:
            atomic_write_json(folder / "status.json", asdict(self))
        except OSError as error:  # the disk may be full for a moment
            note(f"{folder}: its status cannot be written ({error.strerror}); it goes on")

    @classmethod
    def read(cls, folder: Path, member: str, max_steps: int) -> MemberStatus:
        """Read the status in a member's folder; a fresh one if training has not started.

        Raises:
            UserError: the file is damaged.
        """
        path = folder / "status.json"
        if not path.exists():
            return cls(member, max_steps)

        return checks.read_record(path, cls, "the member's status", "delete it; training rewrites it")

    def shown_state(self) -> str:
        """The state; ``killed`` if the process is gone, and the age of the status if it ran on another machine."""
        if self.state not in ("starting", "training"):
            return self.state
        if self._is_elsewhere():
            return f"seen {format_duration(max(time.time() - self.updated, 1))} ago"
        if self.runs():
            return self.state

        return "killed"

    def note(self) -> str:
        """Newest loss and speed; the state before the first."""
        loss = loss_of(self.metrics, "train")
        if loss is not None:
            return f"loss {loss:.4f}  {self.samples_per_second:.0f} samples/s"

        return self.state

    def runs(self) -> bool:
        """Whether the process that wrote the status is alive on this machine."""
        if self.pid <= 0 or self._is_elsewhere():  # os.kill takes 0 and less for process groups
            return False

        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # another user's
            pass

        return self.began in ("", start_time(self.pid))  # process ids are reused

    def _is_elsewhere(self) -> bool:
        return self.host not in ("", platform.node())
