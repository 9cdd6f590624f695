"""Functions that ``runs.run`` calls in the process of the commands, before the first."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ddm_lightning.networks.blocks import SelfAttention
from ddm_lightning.training.objective import Objective


def watch(note):
    """``spoil_a_step``, and note what each attention layer computes in."""
    spoil_a_step(note)
    forward = SelfAttention.forward

    def noting(self: SelfAttention, *inputs: Any) -> Tensor:
        output = forward(self, *inputs)
        if not is_in_torch_dispatch_mode():  # of those that count FLOPs
            note(str(output.dtype))

        return output

    SelfAttention.forward = noting  # type: ignore[method-assign]


def spoil_a_step(note):
    """Give one step of the monolith a loss that is not finite, so that there is a skipped step to replay."""
    weighted = Objective.weighted
    calls = itertools.count()

    def spoilt(self: Objective, losses: dict[str, Tensor], t: Tensor) -> Tensor:
        loss = weighted(self, losses, t)
        return loss * float("nan") if self.member.name == "monolith" and next(calls) == 2 else loss

    Objective.weighted = spoilt  # type: ignore[method-assign]
