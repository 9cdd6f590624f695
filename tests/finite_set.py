"""Exact velocity and cluster posterior of a finite data set: the output of a perfect ensemble."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from ddm_lightning.flow.path import Samples, Times, expand_rows


class FiniteSetOracle:
    """Closed forms for a data set of n equally likely points in K clusters (DDM, 2501.05450).

    x_t given point i is N((1-t)·x_0^i, t²I), so ``p(i | x_t) = softmax_i(-|x_t - (1-t)·x_0^i|²/2t²)``. The velocity of
    a set of points is the mean of ``(x_t - x_0^i)/t`` under these weights. The posterior of a cluster is the sum of the
    weights of its points, which includes the cluster's prior. Computed in float64, returned in the dtype of x_t.

    >>> import torch
    >>> points, labels = torch.tensor([[-1.0], [1.0], [2.0]]), torch.tensor([0, 1, 1])
    >>> oracle = FiniteSetOracle(points, labels, num_clusters=2)
    >>> oracle.cluster_posterior(torch.zeros(1, 1), torch.ones(1))  # at t = 1, the priors
    tensor([[0.3333, 0.6667]])

    Args:
        points: the data set; points may have any shape.
        labels: cluster of each point, 0 … K-1; a cluster may be empty.
        num_clusters: K.
    """

    def __init__(self, points: Float[Tensor, "n *shape"], labels: Int[Tensor, " n"], num_clusters: int) -> None:
        self._points = points.flatten(1).double()
        self._is_in = functional.one_hot(labels, num_clusters).double()

    def velocity(self, x_t: Samples, t: Times, cluster: int | None = None) -> Samples:
        """The velocity of the whole set, or of one ``cluster`` alone, for t > 0.

        Raises:
            ValueError: the cluster is empty.
        """
        logits = self._logits(x_t, t)
        if cluster is not None:
            if not self._is_in[:, cluster].any():
                raise ValueError(f"cluster {cluster} is empty and has no velocity")
            logits = logits + self._is_in[:, cluster].log()
        mean = logits.softmax(1) @ self._points
        return ((x_t.double() - mean.reshape(x_t.shape)) / expand_rows(t.double(), x_t)).to(x_t.dtype)

    def cluster_posterior(self, x_t: Samples, t: Times) -> Float[Tensor, "b k"]:
        """``p(k | x_t, t)`` of every cluster, 0 for an empty one, for t > 0."""
        return (self._logits(x_t, t).softmax(1) @ self._is_in).to(x_t.dtype)

    def _logits(self, x_t: Samples, t: Times) -> Float[Tensor, "b n"]:
        """Log-likelihood of each point, without the shared term -|x_t|²/2t²."""
        rows, time = x_t.flatten(1).double(), t.double()[:, None]
        products = (1 - time) * (rows @ self._points.T) - (1 - time) ** 2 * self._points.square().sum(1) / 2
        return products / time**2
