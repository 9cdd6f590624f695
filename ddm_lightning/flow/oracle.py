"""Exact velocity and cluster posterior of a finite data set: the output of a perfect ensemble."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ddm_lightning.flow.path import Samples, Times, expand_time


class FiniteSetOracle:
    """Closed forms for a data set of n equally likely points in K clusters (DDM, 2501.05450).

    x_t given point i is N((1-t)·x_0^i, t²I), so ``p(i | x_t) = softmax_i(-|x_t - (1-t)·x_0^i|²/2t²)``. The velocity of
    a set of points is the mean of ``(x_t - x_0^i)/t`` under these weights. The posterior of a cluster is the sum of the
    weights of its points, which includes the cluster's prior. Computed in float64, returned in the dtype of x_t.

    >>> points, labels = torch.tensor([[-1.0], [1.0], [2.0]]), torch.tensor([0, 1, 1])
    >>> oracle = FiniteSetOracle(points, labels, num_clusters=2)
    >>> oracle.cluster_posterior(torch.zeros(1, 1), torch.ones(1))  # at t = 1, the priors
    tensor([[0.3333, 0.6667]])

    Args:
        points: the data set; points may have any shape.
        labels: cluster of each point, 0 … K-1; a cluster may be empty.
        num_clusters: K.
        chunk_size: points compared at once; takes memory of about ``b·chunk_size`` numbers.
    """

    def __init__(
        self, points: Float[Tensor, "n *shape"], labels: Int[Tensor, " n"], num_clusters: int, chunk_size: int = 4096
    ) -> None:
        # Sorted by cluster, so that each cluster is a slice and calls copy nothing.
        order = torch.argsort(labels, stable=True)
        self._points = points[order].flatten(1).double()
        self._half_squares = self._points.square().sum(1) / 2
        ends = torch.bincount(labels, minlength=num_clusters).cumsum(0).tolist()
        self._slices = list(zip([0, *ends[:-1]], ends, strict=True))
        self._chunk_size = chunk_size

    def velocity(self, x_t: Samples, t: Times, cluster: int | None = None) -> Samples:
        """The velocity of the whole set, or of one ``cluster`` alone, for t > 0.

        Raises:
            ValueError: the cluster is empty.
        """
        start, end = (0, len(self._points)) if cluster is None else self._slices[cluster]
        if start == end:
            raise ValueError(f"cluster {cluster} is empty and has no velocity")
        total = x_t.new_full((len(x_t), 1), -torch.inf, dtype=torch.float64)
        mean = x_t.new_zeros((len(x_t), self._points.shape[1]), dtype=torch.float64)
        for logits, points in self._chunks(x_t, t, start, end):
            # Running mean weighted by evidence: each chunk moves it by its share of the total so far.
            chunk = logits.logsumexp(1, keepdim=True)
            total = torch.logaddexp(total, chunk)
            mean = mean + (chunk - total).exp() * (logits.softmax(1) @ points - mean)
        return ((x_t.double() - mean.reshape(x_t.shape)) / expand_time(t.double(), x_t)).to(x_t.dtype)

    def cluster_posterior(self, x_t: Samples, t: Times) -> Float[Tensor, "b k"]:
        """``p(k | x_t, t)`` of every cluster, 0 for an empty one, for t > 0."""
        evidence = x_t.new_full((len(x_t), len(self._slices)), -torch.inf, dtype=torch.float64)
        for k, (start, end) in enumerate(self._slices):
            for logits, _ in self._chunks(x_t, t, start, end):
                evidence[:, k] = torch.logaddexp(evidence[:, k], logits.logsumexp(1))
        return evidence.softmax(1).to(x_t.dtype)

    def _chunks(
        self, x_t: Samples, t: Times, start: int, end: int
    ) -> Iterator[tuple[Float[Tensor, "b c"], Float[Tensor, "c d"]]]:
        """Chunks of points with their log-likelihoods, without the shared term -|x_t|²/2t²."""
        rows, time = x_t.flatten(1).double(), t.double()[:, None]
        for first in range(start, end, self._chunk_size):
            chunk = slice(first, min(first + self._chunk_size, end))
            points = self._points[chunk]
            products = (1 - time) * (rows @ points.T) - (1 - time) ** 2 * self._half_squares[chunk]
            yield products / time**2, points
