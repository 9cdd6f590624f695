"""Records of skipped steps, which ``training/guard.py`` writes beside a member's status."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from ddm_lightning.core.files import parse_json


@dataclass(frozen=True)
class SkippedStep:
    """One rank's part of a skipped step."""

    step: int
    """Optimizer steps taken before it."""
    rank: int
    sample_ids: list[int]
    t: list[float]
    """Timestep of each sample."""
    losses: list[float]
    """Loss of each sample; one that is not finite points at the cause, if that is on this rank."""

    def line(self) -> str:
        """Return the record as one line of JSON; JSON has no NaN, so such numbers become words."""
        return json.dumps({**asdict(self), "losses": [x if math.isfinite(x) else str(x) for x in self.losses]})

    @classmethod
    def of(cls, line: str) -> SkippedStep:
        """Parse a ``line``."""
        fields = parse_json(line)
        return cls(**{**fields, "losses": [float(x) for x in fields["losses"]]})


def read_skipped(path: Path) -> list[SkippedStep]:
    """Read the file that ``FiniteGuard.write`` wrote, if it is there."""
    if not path.exists():
        return []

    return [SkippedStep.of(line) for line in path.read_text(encoding="utf-8").splitlines()]


def skipped_of(folder: Path) -> list[SkippedStep]:
    """Read the records of all ranks of the member in ``folder``."""
    return [skipped for path in sorted(folder.glob("skipped_steps*.jsonl")) for skipped in read_skipped(path)]


def skipped_file(folder: Path, rank: int, num_ranks: int) -> Path:
    """Return a rank's file: ``skipped_steps.jsonl``, or ``skipped_steps-0.jsonl`` … with several ranks."""
    return folder / ("skipped_steps.jsonl" if num_ranks == 1 else f"skipped_steps-{rank}.jsonl")
