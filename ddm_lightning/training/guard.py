"""Steps whose gradient is not finite: left out on the device, counted and written down, without a wait for the device.

One bad sample must not end weeks of training, and must not hide: what was in the step is kept until the next report,
which the host waits for anyway.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.core.errors import UserError


@dataclass(frozen=True)
class SkippedStep:
    """One rank's part of a step that was left out."""

    step: int
    """Optimizer steps taken before it."""
    rank: int
    sample_ids: list[int]
    t: list[float]
    """Time of each sample."""
    losses: list[float]
    """Of each sample; those that are not finite point at what is wrong, if it is one of this rank's."""

    def line(self) -> str:
        """One line of JSON, which has no NaN: such numbers are words there."""
        fields = {**asdict(self), "losses": [x if math.isfinite(x) else str(x) for x in self.losses]}
        return json.dumps(fields)

    @classmethod
    def of(cls, line: str) -> SkippedStep:
        """The inverse of ``line``; raises ``ValueError``, ``KeyError`` or ``TypeError`` for what is none."""
        fields = json.loads(line)
        skipped = cls(**{**fields, "losses": [float(x) for x in fields["losses"]]})
        whole = [skipped.step, skipped.rank, *skipped.sample_ids]
        if not (skipped.sample_ids and all(type(number) is int for number in whole)):
            raise ValueError(f"no record of a step: {line}")
        return skipped


@dataclass
class _Seen:
    """A step of which the host does not know yet whether it counted; tensors stay on the device."""

    step: int
    batches: list[tuple[Int[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]]
    norm: Float[Tensor, ""] | None = None


# Where nobody reports, as under a Trainer of one's own, the guard looks itself.
MOST_UNSETTLED_STEPS = 1000


class FiniteGuard:
    """Leaves out steps whose gradient norm, over all ranks, is not finite.

    AdamW's fused kernel reads on the device whether it is to do nothing, as it does for a gradient scaler. Weights,
    moments and their step count then stay as they are; the averages move towards weights that did not change.

    Args:
        member: whose steps, for messages.
        rank: this process's, for the records.
        max_in_succession: steps that may be left out one after the other.
    """

    def __init__(self, member: str, rank: int, max_in_succession: int) -> None:
        self.member, self.rank, self.max_in_succession = member, rank, max_in_succession
        self.num_skipped = 0
        """Since this process started."""
        self._in_succession = 0
        self._seen: list[_Seen] = []
        self._skipped: list[SkippedStep] = []

    def saw(
        self, step: int, sample_ids: Int[Tensor, " b"], t: Float[Tensor, " b"], losses: Float[Tensor, " b"]
    ) -> None:
        """Remember what is in the step that is being taken; raises ``UserError`` as ``settle``."""
        if not self._seen or self._seen[-1].step != step:
            if len(self._seen) >= MOST_UNSETTLED_STEPS:
                self.settle()
            self._seen.append(_Seen(step, []))
        self._seen[-1].batches.append((sample_ids, t, losses.detach()))

    def judge(self, optimizer: torch.optim.Optimizer, norm: Float[Tensor, ""]) -> None:
        """Let ``optimizer`` do nothing in this step if the gradient's ``norm`` is not finite."""
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # fused optimizers read it
        if self._seen:
            self._seen[-1].norm = norm

    def settle(self) -> None:
        """Find out which steps were left out; here the host waits for the device.

        Raises:
            UserError: too many in succession; no weight has taken harm.
        """
        judged = [seen for seen in self._seen if seen.norm is not None]
        self._seen = [seen for seen in self._seen if seen.norm is None]
        if not judged:
            return
        finite = torch.stack([seen.norm for seen in judged if seen.norm is not None]).isfinite().tolist()
        longest, last = 0, 0
        for seen, counted in zip(judged, finite, strict=True):
            self._in_succession = 0 if counted else self._in_succession + 1
            if self._in_succession > longest:
                longest, last = self._in_succession, seen.step
            if not counted:
                self.num_skipped += 1
                self._skipped.append(self._record(seen))
        if longest > self.max_in_succession:
            raise UserError(
                f"{self.member}: {longest} steps in succession, up to step {last}, had a gradient that is "
                "not finite and were left out: training diverged; lower its train.learning_rate (in another "
                "run_dir=…), or look at one of them: the command status says how"
            )

    def _record(self, seen: _Seen) -> SkippedStep:
        ids, times, losses = (torch.cat(parts).tolist() for parts in zip(*seen.batches, strict=True))
        return SkippedStep(seen.step, self.rank, ids, times, losses)

    def write(self, path: Path) -> None:
        """Append to ``path`` what ``settle`` found; a step that a resumed training takes once more is there once."""
        if not self._skipped:
            return
        known = {(skipped.step, skipped.rank) for skipped in read_skipped(path)}
        before = path.read_bytes() if path.exists() else b""
        with path.open("a", encoding="utf-8") as lines:
            if before and not before.endswith(b"\n"):
                lines.write("\n")  # a killed process left half a line, with which the next would be lost
            for skipped in self._skipped:
                if (skipped.step, skipped.rank) not in known:
                    lines.write(skipped.line() + "\n")
        self._skipped.clear()


def read_skipped(path: Path) -> list[SkippedStep]:
    """What ``FiniteGuard.write`` wrote; a line that a killed process left half is passed over."""
    found: list[SkippedStep] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found.append(SkippedStep.of(line))
            except (ValueError, KeyError, TypeError):
                continue
    return found


def skipped_of(folder: Path) -> list[SkippedStep]:
    """What all ranks of the member in ``folder`` wrote."""
    return [skipped for path in sorted(folder.glob("skipped_steps*.jsonl")) for skipped in read_skipped(path)]


def skipped_file(folder: Path, rank: int, num_ranks: int) -> Path:
    """Where a rank writes: ``skipped_steps.jsonl``, or with several ``skipped_steps-0.jsonl`` and so on."""
    return folder / ("skipped_steps.jsonl" if num_ranks == 1 else f"skipped_steps-{rank}.jsonl")
