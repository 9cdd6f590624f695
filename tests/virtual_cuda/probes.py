"""Functions that ``runs.run`` calls in the process of the commands, before the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ddm_lightning.training.module import MemberModule


def spoil_a_step(note: Callable[[Any], None]) -> None:
    """Give one step of the monolith a loss that is not finite, so that there is a skipped step to replay."""
    weighted = MemberModule.weighted

    def spoilt(self: MemberModule, losses: dict[str, Tensor], t: Tensor) -> Tensor:
        loss = weighted(self, losses, t)
        return loss * float("nan") if self.member.name == "monolith" and self.global_step == 2 else loss

    MemberModule.weighted = spoilt  # type: ignore[method-assign]
