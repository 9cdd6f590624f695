"""Continue sampling when an expert returns NaN: the rows that it breaks are generated again without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.errors import UserError, note
from ddm_lightning.ensemble.velocity import Ensemble, NotFiniteError

Generate: TypeAlias = Callable[[Ensemble, list[int]], Float[Tensor, "r c h w"]]
"""``generate(ensemble, rows)``: samples of the given rows, on the CPU."""


def without_failed(
    ensemble: Ensemble, generate: Generate, rows: list[int], x_0: Float[Tensor, "r c h w"]
) -> Float[Tensor, "r c h w"]:
    """Generate samples that are not finite again, with the same noise and without the experts that failed.

    Only this second attempt looks at each expert. The rest keep their weights in proportion. A failure is noted on
    stderr once per ensemble.

    Args:
        ensemble: the ensemble.
        generate: generates samples.
        rows: the samples that were generated.
        x_0: the finished samples; changed in place.

    Raises:
        UserError: no expert is left for the strategy, or the router fails.
    """
    excluded = set[int]()
    broken = (~x_0.isfinite().flatten(1).all(1)).nonzero().squeeze(1)
    while len(broken):
        try:
            x_0[broken] = generate(ensemble.watched(excluded), [rows[i] for i in broken.tolist()])
            break
        except NotFiniteError as error:
            expert: int = error.args[0]
            name = ensemble.names[expert]
            if expert in excluded or len(excluded) == ensemble.num_clusters - 1:
                raise UserError(f"{name}: returns NaN, and the strategy has no other expert; fit it again") from None
            if expert not in ensemble.failed:
                note(f"{name} returns NaN on {len(broken)} images; they are made without it, with renormalised weights")
            ensemble.failed.add(expert)
            excluded.add(expert)
    return x_0
