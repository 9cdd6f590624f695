"""Which experts a row is sent to, and how much each of them counts."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ddm_lightning.core.errors import UserError

STRATEGIES = ("full", "top-1", "top-k")
"""What a router serves; ``bayes`` (``bayes.py``) needs none and is no function of one noisy sample."""


def route(probabilities: Float[Tensor, "b K"], strategy: str, top_k: int = 2) -> Float[Tensor, "b K"]:
    """Weights of the experts from the router's probabilities (DDM, 2501.05450).

    Args:
        probabilities: p(cluster | x_t, t, condition), rows summing to 1.
        strategy: ``full`` keeps every expert, ``top-k`` the ``top_k`` most probable, ``top-1`` the most probable.
        top_k: experts that ``top-k`` keeps; all of them when there are fewer.

    Returns:
        Rows that sum to 1, exactly 0 for an expert that is not to be evaluated.

    Raises:
        UserError: unknown ``strategy``, or ``top_k`` below 1.
    """
    if strategy == "full":
        return probabilities
    if strategy not in STRATEGIES:
        raise UserError(f"sample.strategy {strategy!r} is none of {', '.join(STRATEGIES)}, bayes")
    num_kept = 1 if strategy == "top-1" else min(top_k, probabilities.shape[1])
    if num_kept < 1:
        raise UserError(f"sample.top_k = {top_k} keeps no expert; set it to at least 1")
    kept, experts = probabilities.topk(num_kept, dim=1)
    return torch.zeros_like(probabilities).scatter_(1, experts, kept / kept.sum(dim=1, keepdim=True))
