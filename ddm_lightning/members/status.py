"""One member's state as a small JSON file that others may read at any moment."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, read_json
from ddm_lightning.core.formatting import duration
from ddm_lightning.core.processes import start_time

HELD_OUT_STEP = "held_out/step"
"""In the metrics of an artifact: the step whose weights the other held-out figures are of."""

STATES = ("waiting", "starting", "training", "stopped", "failed", "done")


def loss_of(metrics: Mapping[str, float], split: str) -> float | None:
    """The loss of ``train`` or ``held_out``: an expert's, or a router's cross-entropy, which older runs call a loss."""
    return metrics.get(f"{split}/cross_entropy", metrics.get(f"{split}/loss"))


@dataclass
class MemberStatus:
    """Where one member's training stands."""

    member: str
    """Its name."""
    max_steps: int
    """Optimizer steps that it will take."""
    state: str = "waiting"
    """One of ``STATES``; ``stopped`` is on request."""
    step: int = 0
    """Optimizer steps taken."""
    seconds: float = 0.0
    """Training time, summed over restarts."""
    samples_per_second: float = 0.0
    """Training samples a second since the last start, over all devices."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Newest logged averages."""
    validated_step: int = 0
    """Step of the newest validation that came to its end."""
    pid: int = 0
    """Process that trains it."""
    began: str = ""
    """When that process began, in ticks of its machine's clock; empty where the system does not say."""
    host: str = ""
    """Name of that machine."""
    updated: float = 0.0
    """Unix time of the last write."""

    def write(self, folder: Path) -> None:
        """Write ``status.json`` in the member's folder."""
        self.updated = time.time()
        self.pid = os.getpid()
        self.began, self.host = start_time(self.pid), platform.node()
        atomic_write_json(folder / "status.json", asdict(self))

    @classmethod
    def read(cls, folder: Path, member: str, max_steps: int) -> MemberStatus:
        """The status in a member's folder; a fresh one when it has not started.

        Raises:
            UserError: the file is damaged.
        """
        path = folder / "status.json"
        if not path.exists():
            return cls(member, max_steps)
        remedy = "delete it; training rewrites it"
        loaded: dict[str, Any] = read_json(path, "the member's status", remedy)
        fresh = cls(member, max_steps)
        if not isinstance(loaded, dict):
            raise UserError(f"{path}: the member's status is no object; {remedy}")
        for key, value in loaded.items():
            own = getattr(fresh, key, None)
            fits = (int, float) if isinstance(own, float) else type(own)
            if key in cls.__dataclass_fields__ and (not isinstance(value, fits) or isinstance(value, bool)):
                raise UserError(f"{path}: key {key!r} = {value!r} is no {type(own).__name__}; {remedy}")
            if isinstance(own, int | float) and not 0 <= value < math.inf:
                raise UserError(f"{path}: key {key!r} = {value!r} is not finite, or negative; {remedy}")
        if loaded.get("state", fresh.state) not in STATES:
            raise UserError(f"{path}: key 'state' = {loaded['state']!r} is none of {', '.join(STATES)}; {remedy}")
        for name, value in loaded.get("metrics", {}).items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UserError(f"{path}: key 'metrics.{name}' = {value!r} is no number; {remedy}")
        return replace(fresh, **{key: value for key, value in loaded.items() if key in cls.__dataclass_fields__})

    def shown_state(self) -> str:
        """The state; ``killed`` if the process that wrote it is gone, and its age if that ran on another machine."""
        if self.state not in ("starting", "training"):
            return self.state
        if self._is_elsewhere():
            return f"seen {duration(max(time.time() - self.updated, 1))} ago"
        return self.state if self.runs() else "killed"

    def note(self) -> str:
        """The newest figures in a few words."""
        loss = loss_of(self.metrics, "train")
        return f"loss {loss:.4f}  {self.samples_per_second:.0f} samples/s" if loss is not None else self.state

    def runs(self) -> bool:
        """Whether the process that wrote it is alive on this machine."""
        if self.pid <= 0 or self._is_elsewhere():  # to a signal, 0 and less are groups of processes
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass  # another user's
        return self.began in ("", start_time(self.pid))  # a later process may have its number

    def _is_elsewhere(self) -> bool:
        return self.host not in ("", platform.node())
