"""Calibration of routers: temperatures by time (Guo et al., 1706.04599).

A temperature divides the logits. It changes how sure a router is, but never which cluster is the most probable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ddm_lightning.flow.path import Times

NUM_BINS = 15
_CHOICES = torch.logspace(-2, 2, 41, base=2)
"""Candidate temperatures, 1/4 … 4; the best one is refined by a parabola."""


def temperature_at(t: Times, temperatures: Sequence[float]) -> Times:
    """Temperature at each ``t``, linear between the middles of equal parts of [0, 1] and constant beyond them.

    Args:
        t: times.
        temperatures: one for each part, in order; none gives 1.
    """
    if not temperatures:
        return torch.ones_like(t)

    known = torch.tensor([temperatures[0], *temperatures, temperatures[-1]], dtype=t.dtype)
    known = known.to(t.device, non_blocking=True)  # without waiting for a GPU
    place = (t * len(temperatures) + 0.5).clamp(0, len(temperatures) + 0.999)
    left = place.long()
    return torch.lerp(known[left], known[(left + 1).clamp(max=len(known) - 1)], place - left)


def reliability(log_probabilities: Float[Tensor, "*c n K"], clusters: Int[Tensor, " n"]) -> Float[Tensor, "*c bins 3"]:
    """Sums of confidence, hits and samples in ``NUM_BINS`` equal bins of confidence; additive over samples."""
    confidence, routed = log_probabilities.exp().max(-1)
    hits = (routed == clusters).to(confidence)
    # Bins are open on the left, so that the last one holds a confidence of 1.
    index = ((confidence * NUM_BINS).ceil().long() - 1).clamp(0, NUM_BINS - 1)
    sums = confidence.new_zeros(*confidence.shape[:-1], NUM_BINS, 3)
    values = torch.stack([confidence, hits, torch.ones_like(hits)], dim=-1)
    return sums.scatter_add_(-2, index[..., None].expand(*index.shape, 3), values)


def calibration_error(sums: Float[Tensor, "*c bins 3"]) -> Float[Tensor, "*c"]:
    """Expected calibration error (ECE) from ``reliability``: mean |confidence - accuracy| over the bins."""
    confidence, hits, count = sums.unbind(-1)
    return (confidence - hits).abs().sum(-1) / count.sum(-1).clamp(min=1)


def is_fitted(sample_ids: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Whether each held-out sample is in the half that fits temperatures; the other half evaluates them."""
    return (sample_ids * 2654435761 >> 16) % 2 == 0  # Knuth's hash: neighbours in the source are often alike


class Calibration:
    """Fits temperatures on one half of the held-out samples and evaluates them on the other; a hash of ids splits them.

    Sums over samples are kept for each of 41 temperatures, so that those of several ranks can be added.
    """

    def __init__(self, num_times: int) -> None:
        self.loss = torch.zeros(num_times, len(_CHOICES), dtype=torch.float64)
        """Negative log-likelihood of the first half."""
        self.reliability = torch.zeros(num_times, len(_CHOICES), NUM_BINS, 3, dtype=torch.float64)
        """``reliability`` of the second half."""

    def add(
        self, index: int, logits: Float[Tensor, "n K"], clusters: Int[Tensor, " n"], sample_ids: Int[Tensor, " n"]
    ) -> None:
        """Add predictions at the ``index``-th time; all tensors are on the CPU."""
        scaled = logits / _CHOICES.to(logits)[:, None, None]
        log_probabilities = scaled.log_softmax(2).double()
        first = is_fitted(sample_ids)
        own = clusters[first].expand(len(_CHOICES), -1)
        self.loss[index] -= log_probabilities[:, first].gather(2, own[..., None]).sum((1, 2))
        self.reliability[index] += reliability(log_probabilities[:, ~first], clusters[~first])

    def temperatures(self) -> list[float]:
        """Temperature of the lowest loss at each time; 1 without samples."""
        fitted = []
        for loss in self.loss:
            best = int(loss.argmin())
            exponent = float(_CHOICES[best].log2())
            if 0 < best < len(loss) - 1:
                below, lowest, above = loss[best - 1 : best + 2].tolist()
                exponent += 0.05 * (below - above) / max(below - 2 * lowest + above, 1e-12)

            fitted.append(2.0**exponent if loss.any() else 1.0)

        return fitted

    def errors(self) -> tuple[list[float], list[float]]:
        """ECE at each time on the second half, before and after calibration."""
        errors = calibration_error(self.reliability)
        before = errors[:, len(_CHOICES) // 2]
        nearest = [int((_CHOICES - one).abs().argmin()) for one in self.temperatures()]
        after = errors[range(len(errors)), nearest]
        return before.tolist(), after.tolist()
