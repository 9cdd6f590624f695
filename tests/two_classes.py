"""A finite set with two classes in four clusters: its exact experts and router, and its closed forms."""

import torch
from ensemble_networks import finite_set
from finite_set import FiniteSetOracle
from torch import nn

from ddm_lightning.ensemble.velocity import Ensemble

SIZES = [40, 8, 12, 20]
K = len(SIZES)
SHAPE = (1, 1, 3)


class ByClass(nn.Module):
    """Answers each row from the closed form of its class, or of both classes without a condition."""

    prediction = "velocity"

    def __init__(self, oracles, k):
        super().__init__()
        self.oracles = oracles
        self.k = k
        self.num_rows = 0

    def forward(self, x_t, t, condition):
        self.num_rows += len(x_t)
        answers = [
            one.cluster_posterior(x_t, t).log() if self.k is None else one.velocity(x_t, t, self.k)
            for one in self.oracles
        ]
        chosen = torch.where(condition.keep, condition.values, 2)
        return torch.stack(answers)[chosen, torch.arange(len(x_t))]


def points_of_two_classes():
    """Points, clusters, and classes of different shares in each cluster; float64."""
    points, clusters = finite_set(SIZES, 3, seed=1)
    classes = (torch.arange(len(points)) % (2 + clusters) == 0).long()
    return points.reshape(-1, *SHAPE), clusters, classes


def exact(data):
    points, clusters, classes = data
    kept = [classes == 0, classes == 1, classes >= 0]
    oracles = [FiniteSetOracle(points[own], clusters[own], K) for own in kept]
    return Ensemble([ByClass(oracles, k) for k in range(K)], ByClass(oracles, None), [n / 80 for n in SIZES])


def mean_velocity(points, weights, x_t, t):
    """Closed form of a set whose points have weights: its velocity and the log of its density, up to a constant."""
    squares = (x_t[:, None] - (1 - t)[:, None, None, None, None] * points).flatten(2).square().sum(2)
    logits = weights.log() - squares / (2 * t[:, None] ** 2)
    mean = torch.einsum("bn,n...->b...", logits.softmax(1), points)
    return (x_t - mean) / t[:, None, None, None], logits.logsumexp(1)
