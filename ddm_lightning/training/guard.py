"""Skip steps whose gradient is not finite, on the device, and record them.

One bad sample must neither end weeks of training nor go unnoticed. The samples of a step are kept until the next
report, which waits for the device anyway.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.core.errors import UserError


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
        fields = {**asdict(self), "losses": [x if math.isfinite(x) else str(x) for x in self.losses]}
        return json.dumps(fields)

    @classmethod
    def of(cls, line: str) -> SkippedStep:
        """Parse a ``line``; raises ``ValueError``, ``KeyError`` or ``TypeError`` if it is not one."""
        fields = json.loads(line)
        return cls(**{**fields, "losses": [float(x) for x in fields["losses"]]})


@dataclass
class _Seen:
    """A step whose gradient norm the host has not read; its tensors stay on the device."""

    step: int
    rank: int
    batches: list[tuple[Int[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]]
    norm: Float[Tensor, ""] | None = None


class FiniteGuard:
    """Skips steps whose gradient norm, over all ranks, is not finite.

    AdamW's fused kernel reads on the device whether to do nothing, as it does for a gradient scaler. Weights, moments
    and step counts then stay as they are; the EMA takes a step towards the unchanged weights.

    Args:
        member: for error messages.
        max_consecutive: consecutive steps that may be skipped.
    """

    def __init__(self, member: str, max_consecutive: int) -> None:
        self.member, self.max_consecutive = member, max_consecutive
        self.num_skipped = 0
        """Skipped steps since this process started."""
        self._consecutive = 0
        self._seen: list[_Seen] = []
        self._skipped: list[SkippedStep] = []

    def record(
        self, step: int, rank: int, sample_ids: Int[Tensor, " b"], t: Float[Tensor, " b"], losses: Float[Tensor, " b"]
    ) -> None:
        """Remember this rank's samples of the current step."""
        if not self._seen or self._seen[-1].step != step:
            self._seen.append(_Seen(step, rank, []))
        self._seen[-1].batches.append((sample_ids, t, losses.detach()))

    def skip_unless_finite(self, optimizer: torch.optim.Optimizer, norm: Float[Tensor, ""]) -> None:
        """Make ``optimizer`` skip this step if the gradient's ``norm`` is not finite."""
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # fused optimizers read it
        if self._seen:
            self._seen[-1].norm = norm

    def find_skipped(self) -> None:
        """Find the skipped steps; the host waits for the device here.

        Raises:
            UserError: too many consecutive ones; no weight was damaged.
        """
        taken = [(seen, seen.norm) for seen in self._seen if seen.norm is not None]
        self._seen = [seen for seen in self._seen if seen.norm is None]
        if not taken:
            return
        longest, last = 0, 0
        finite = torch.stack([norm for _, norm in taken]).isfinite().tolist()
        for (seen, _), is_finite in zip(taken, finite, strict=True):
            self._consecutive = 0 if is_finite else self._consecutive + 1
            if self._consecutive > longest:
                longest, last = self._consecutive, seen.step
            if not is_finite:
                self.num_skipped += 1
                ids, times, losses = (torch.cat(parts).tolist() for parts in zip(*seen.batches, strict=True))
                self._skipped.append(SkippedStep(seen.step, seen.rank, ids, times, losses))
        if longest > self.max_consecutive:
            raise UserError(
                f"{self.member}: training diverged: {longest} consecutive steps, up to step {last}, "
                "had no finite gradient; lower its train.learning_rate in another run_dir=…, "
                "or find the sample with replay"
            )

    def write(self, path: Path) -> None:
        """Append the newly found steps to ``path``; a step that a resumed training repeats is recorded once."""
        if not self._skipped:
            return
        known = {(skipped.step, skipped.rank) for skipped in read_skipped(path)}
        before = path.read_bytes() if path.exists() else b""
        with path.open("a", encoding="utf-8") as lines:
            if before and not before.endswith(b"\n"):
                lines.write("\n")  # a killed process left half a line
            for skipped in self._skipped:
                if (skipped.step, skipped.rank) not in known:
                    lines.write(skipped.line() + "\n")
        self._skipped.clear()


def read_skipped(path: Path) -> list[SkippedStep]:
    """Read the file that ``FiniteGuard.write`` wrote; damaged lines, such as a killed process leaves, are ignored."""
    found: list[SkippedStep] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                found.append(SkippedStep.of(line))
    return found


def skipped_of(folder: Path) -> list[SkippedStep]:
    """Read the records of all ranks of the member in ``folder``."""
    return [skipped for path in sorted(folder.glob("skipped_steps*.jsonl")) for skipped in read_skipped(path)]


def skipped_file(folder: Path, rank: int, num_ranks: int) -> Path:
    """Return a rank's file: ``skipped_steps.jsonl``, or ``skipped_steps-0.jsonl`` … with several ranks."""
    return folder / ("skipped_steps.jsonl" if num_ranks == 1 else f"skipped_steps-{rank}.jsonl")
