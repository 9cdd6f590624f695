"""Skip steps whose gradient is not finite, on the device, and record them.

One bad sample must neither end weeks of training nor go unnoticed. The samples of a step are kept until the next
report, which waits for the device anyway.
"""

from __future__ import annotations

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_text
from ddm_lightning.members.skipped import SkippedStep, read_skipped


class FiniteGuard:
    """Skips steps whose gradient norm, over all ranks, is not finite.

    AdamW's fused kernel reads on the device whether to do nothing, as it does for a gradient scaler. Weights, moments
    and step counts then stay as they are; the EMA takes a step towards the unchanged weights.

    Args:
        member: for error messages.
        max_consecutive: consecutive steps that may be skipped.
    """

    def __init__(self, member: str, max_consecutive: int) -> None:
        self.member = member
        self.max_consecutive = max_consecutive
        self.num_skipped = 0
        """Skipped steps since this process started."""
        self._consecutive = 0
        self._batches: list[tuple[Int[Tensor, " b"], Float[Tensor, " b"], Float[Tensor, " b"]]] = []
        self._seen: list[tuple[int, int, Float[Tensor, ""], list[tuple[Tensor, Tensor, Tensor]]]] = []
        """Step, rank, gradient norm and batches of steps that the host has not read; tensors stay on the device."""
        self._skipped: list[SkippedStep] = []

    def record(self, sample_ids: Int[Tensor, " b"], t: Float[Tensor, " b"], losses: Float[Tensor, " b"]) -> None:
        """Remember this rank's samples of the current step."""
        self._batches.append((sample_ids, t, losses.detach()))

    def skip_unless_finite(
        self, step: int, rank: int, optimizer: torch.optim.Optimizer, norm: Float[Tensor, ""]
    ) -> None:
        """Make ``optimizer`` skip this step if the gradient's ``norm`` is not finite."""
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # fused optimizers read it
        self._seen.append((step, rank, norm, self._batches))
        self._batches = []

    def find_skipped(self) -> None:
        """Find the skipped steps; the host waits for the device here.

        Raises:
            UserError: too many consecutive ones; no weight was damaged.
        """
        if not self._seen:
            return

        longest = 0, 0  # number of consecutive skipped steps, and the last of them
        finite = torch.stack([norm for _, _, norm, _ in self._seen]).isfinite().tolist()
        for (step, rank, _, batches), is_finite in zip(self._seen, finite, strict=True):
            if is_finite:
                self._consecutive = 0
                continue

            self._consecutive += 1
            self.num_skipped += 1
            longest = max(longest, (self._consecutive, step))
            # A step has several batches if the Trainer accumulates gradients.
            ids, times, losses = (torch.cat(parts).tolist() for parts in zip(*batches, strict=True))
            self._skipped.append(SkippedStep(step, rank, ids, times, losses))

        self._seen.clear()
        if longest[0] > self.max_consecutive:
            raise UserError(
                f"{self.member}: training diverged: {longest[0]} consecutive steps, up to step {longest[1]}, "
                "had no finite gradient; lower its train.learning_rate in another run_dir=…, "
                "or find the sample with replay"
            )

    def write(self, path: Path) -> None:
        """Add the newly found steps to ``path``; a step that a resumed training repeats is recorded once."""
        if self._skipped:
            records = {skipped.step: skipped for skipped in [*read_skipped(path), *self._skipped]}
            atomic_write_text(path, "".join(skipped.line() + "\n" for skipped in records.values()))
            self._skipped.clear()
