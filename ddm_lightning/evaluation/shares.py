"""Shares of the clusters among images, estimated by a classifier."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ddm_lightning.flow.randomness import keyed_generator

WEIGHT_DECAYS = (1e-3, 1e-2, 1e-1)
"""Weight decays that the classifier tries."""
ROUNDS = 200
"""Number of bootstrap samples of ``ClusterShares.by_chance``."""


class ClusterShares:
    """Multinomial logistic regression from features to clusters, and the shares that it implies.

    The mean of an imperfect classifier's probabilities is biased towards the shares of the training set. It is the sum
    of the mean probabilities on each cluster's images, weighted by the true shares; these follow by least squares
    (Lipton et al., 1802.03916).

    Args:
        train: features that took no part in the clustering, of training images.
        clusters: their clusters, below ``num_clusters``.
        held_out: features of other images, which choose the weight decay and give the classifier's confusion.
        held_out_clusters: their clusters.
        num_clusters: K.
    """

    def __init__(
        self,
        train: Float[Tensor, "n d"],
        clusters: Int[Tensor, " n"],
        held_out: Float[Tensor, "m d"],
        held_out_clusters: Int[Tensor, " m"],
        num_clusters: int,
    ) -> None:
        self._mean = train.mean(0)
        self._std = train.std(0).clamp(min=1e-6)

        def loss(weights: Tensor) -> float:
            return float(F.cross_entropy(self._inputs(held_out) @ weights, held_out_clusters))

        fits = [self._fit(train, clusters, num_clusters, decay) for decay in WEIGHT_DECAYS]
        self._weights = min(fits, key=loss)
        self._held_out = self._probabilities(held_out)
        self._clusters = held_out_clusters
        is_right = self._held_out.argmax(1) == held_out_clusters
        self.accuracy = float(is_right.float().mean())
        """Accuracy of the classifier on held-out samples."""

    def shares(self, features: Float[Tensor, "n d"]) -> Float[Tensor, " K"]:
        """Estimate the clusters' shares among images by their features; they sum to 1."""
        return _solved(self._probabilities(features), self._held_out, self._clusters)

    def by_chance(self, num: int, seed: int) -> Float[Tensor, " rounds"]:
        """Total variation between the estimated and the true shares of ``num`` real images, in each of ``ROUNDS``.

        A bootstrap: each round takes held-out images with replacement, both to judge and for the confusion.
        """
        generator = keyed_generator(seed, "shares by chance")
        held_out = len(self._clusters)
        true = self._clusters.bincount(minlength=self._held_out.shape[1]) / held_out
        found = []
        for _ in range(ROUNDS):
            drawn = torch.randint(held_out, (num,), generator=generator)
            known = torch.randint(held_out, (held_out,), generator=generator)
            estimated = _solved(self._held_out[drawn], self._held_out[known], self._clusters[known])
            found.append(total_variation(estimated, true))

        return torch.tensor(found)

    def _fit(
        self, train: Float[Tensor, "n d"], clusters: Int[Tensor, " n"], num_clusters: int, decay: float
    ) -> Float[Tensor, "d1 K"]:
        inputs = self._inputs(train)
        weights = torch.zeros(inputs.shape[1], num_clusters, requires_grad=True)
        optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

        def closure() -> float:
            optimizer.zero_grad()
            penalty = decay / 2 * weights.square().sum()
            loss = F.cross_entropy(inputs @ weights, clusters) + penalty
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
        return weights.detach()

    def _inputs(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n d1"]:
        standardised = (features - self._mean) / self._std
        return torch.cat([standardised, torch.ones(len(features), 1)], dim=1).float()

    def _probabilities(self, features: Float[Tensor, "n d"]) -> Float[Tensor, "n K"]:
        return (self._inputs(features) @ self._weights).softmax(1)


def _solved(
    probabilities: Float[Tensor, "n K"], known: Float[Tensor, "m K"], clusters: Int[Tensor, " m"]
) -> Float[Tensor, " K"]:
    """Shares that explain the mean of ``probabilities``, given the probabilities of images of ``known`` clusters."""
    means = [known[clusters == k].mean(0) for k in range(known.shape[1])]
    confusion = torch.stack(means).nan_to_num(0.0)
    found = torch.linalg.lstsq(confusion.T, probabilities.mean(0)[:, None])
    shares = found.solution[:, 0].clamp(min=0)
    return shares / shares.sum()


def total_variation(p: Float[Tensor, "*b K"], q: Float[Tensor, "*b K"]) -> float:
    """Half the L1 distance between two distributions, averaged over rows."""
    return float((p - q).abs().sum(-1).mean() / 2)
