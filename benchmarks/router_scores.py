"""Accuracy and calibration of routers on noisy samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.networks.calibration import calibration_error, reliability

TIMES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
BATCH_SIZE = 256

Classifier: TypeAlias = Callable[[Float[Tensor, "n c h w"], float], Float[Tensor, "n K"]]
"""``classifier(x_t, t)``: log-probabilities of the clusters, one row per noisy sample."""


@dataclass(frozen=True, eq=False)
class RoutingScore:
    """Scores of a classifier of noisy samples at one time."""

    t: float
    """Noise level."""
    hit: Float[Tensor, " n"]
    """1 where the most probable cluster is the true one, else 0."""
    loss: Float[Tensor, " n"]
    """Negative log-probability of the true cluster, in nats."""
    calibration_error: float
    """ECE."""
    confidence: Float[Tensor, " bins"]
    """Mean probability of the most probable cluster in each bin; 0 in an empty bin."""
    hits: Float[Tensor, " bins"]
    """Accuracy in each bin; 0 in an empty bin."""
    share: Float[Tensor, " bins"]
    """Share of the samples in each bin."""

    @property
    def accuracy(self) -> float:
        """Mean of ``hit``."""
        return float(self.hit.mean())

    @property
    def nll(self) -> float:
        """Mean of ``loss``."""
        return float(self.loss.mean())


def score(log_probabilities: Float[Tensor, "n K"], clusters: Int[Tensor, " n"], t: float) -> RoutingScore:
    """Score predictions against the true clusters."""
    log_probabilities = log_probabilities.double()
    hit = (log_probabilities.argmax(1) == clusters).double()
    loss = -log_probabilities.gather(1, clusters[:, None])[:, 0]
    sums = reliability(log_probabilities, clusters)
    confidence, hits, count = sums.unbind(-1)
    filled = count.clamp_min(1)
    return RoutingScore(
        t, hit, loss, float(calibration_error(sums)), confidence / filled, hits / filled, count / len(clusters)
    )


def score_by_time(
    classifier: Classifier,
    x_0: Float[Tensor, "n c h w"],
    clusters: Int[Tensor, " n"],
    *,
    times: Sequence[float] = TIMES,
    num_draws: int = 8,
    seed: int = 0,
) -> list[RoutingScore]:
    """Score ``classifier`` at each time on ``num_draws`` noisy versions of every sample.

    The noise depends on ``seed`` and the draw alone, so all classifiers and times share it.
    """
    scores: list[RoutingScore] = []
    for t in times:
        predicted = [classifier(noised(x_0, t, draw, seed), t) for draw in range(num_draws)]
        scores.append(score(torch.cat(predicted), clusters.repeat(num_draws), t))
    return scores


def standard_error(values: Float[Tensor, " n"], num_draws: int) -> float:
    """Standard error of the mean of one number per prediction, in the order of ``score_by_time``.

    Draws of one sample are not independent, so their mean counts as one observation. To compare two classifiers, pass
    the differences: the variance they share then cancels.
    """
    by_sample = values.reshape(num_draws, -1).mean(0)
    return float(by_sample.std() / len(by_sample) ** 0.5)


def noised(
    x_0: Float[Tensor, "n c h w"], t: float, draw: int, seed: int, purpose: str = "routing"
) -> Float[Tensor, "n c h w"]:
    """Add the noise of one draw to every sample; different purposes have different noise."""
    noise = torch.randn(x_0.shape, generator=keyed_generator(seed, purpose, draw))
    return interpolate(x_0, noise, torch.full((len(x_0),), t))


def router_classifier(router: nn.Module, condition: Condition | None) -> Classifier:
    """Wrap a trained router; ``condition`` has one row per sample, or is None for the null condition in all."""
    device = next((parameter.device for parameter in router.parameters()), torch.device("cpu"))

    @torch.no_grad()
    def classify(x_t: Float[Tensor, "n c h w"], t: float) -> Float[Tensor, "n K"]:
        logits = []
        for first in range(0, len(x_t), BATCH_SIZE):
            rows = slice(first, first + BATCH_SIZE)
            part = None if condition is None else condition.rows(rows).to(device)
            x = x_t[rows].to(device)
            logits.append(router(x, torch.full((len(x),), t, device=device), part).double().cpu())
        # Not the logarithm of probabilities, which underflow to 0 for a confident but wrong router.
        return torch.cat(logits).log_softmax(1)

    router.eval()
    return classify
