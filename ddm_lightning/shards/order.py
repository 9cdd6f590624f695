"""The order of the samples: one permutation an epoch, of which each rank takes its part of every step.

Both back ends follow it. It depends on the shards, the seed, the epoch and ``num_canonical_nodes`` alone: not on
workers, and not on ranks, so that a run that was stopped on some ranks goes on exactly on any other number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from streaming.base.shuffle import get_shuffle

# Samples within which a shard's samples are scattered: what has to be fetched before the first step of an epoch.
_MIN_BLOCK = 1 << 18
_SHUFFLE = "py1e"


@dataclass(frozen=True)
class Ranks:
    """Which rank this is, of how many: ``ranks_per_node`` on each of ``num_nodes``."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    rank: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks of all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def rank_of_node(self) -> int:
        """This rank among its node's."""
        return self.rank % self.ranks_per_node


def block_size(shard_sizes: Sequence[int]) -> int:
    """Samples within which those of one shard are scattered; a shard larger than it would not be mixed with others."""
    return max(_MIN_BLOCK, 4 * max(shard_sizes))


def epoch_order(
    shard_sizes: Sequence[int], *, seed: int, epoch: int, shuffle: bool, num_canonical_nodes: int = 1
) -> Int[np.ndarray, "n"]:
    """Every sample once, by its position in the shards laid one behind the other.

    Shuffled with Streaming's ``py1e``, in ``num_canonical_nodes`` parts of equal size that take turns: a node of P
    takes every P-th sample, hence reads the shards of its own parts only, if P divides them.
    """
    num_samples = int(np.sum(shard_sizes))
    order = np.arange(num_samples, dtype=np.int64)
    if shuffle:
        sizes = np.asarray(shard_sizes, dtype=np.int64)
        order = get_shuffle(_SHUFFLE, sizes, num_canonical_nodes, seed, epoch, block_size(shard_sizes))
    if num_canonical_nodes == 1:
        return order
    bounds = np.arange(num_canonical_nodes + 1) * num_samples // num_canonical_nodes
    turns = np.full((num_canonical_nodes, int(np.diff(bounds).max())), -1, dtype=np.int64)
    for turn, first, last in zip(turns, bounds, bounds[1:], strict=False):
        turn[: last - first] = order[first:last]
    flat = turns.T.reshape(-1)
    return flat[flat >= 0]


def num_steps(num_samples: int, num_ranks: int, batch_size: int, *, full: bool) -> int:
    """Steps of an epoch of which ``num_samples`` are left, for ``steps`` with the same settings."""
    if full:
        return num_samples // (num_ranks * batch_size)
    return math.ceil(math.ceil(num_samples / num_ranks) / batch_size)


def steps(
    order: Int[np.ndarray, "n"], ranks: Ranks, batch_size: int, *, full: bool
) -> Int[np.ndarray, "nodes ranks steps batch"]:
    """Who takes which samples in which step; step s takes the next ``num_ranks * batch_size`` samples of the order.

    Args:
        order: what is left of the epoch.
        ranks: how many nodes and ranks there are.
        batch_size: samples a rank and step.
        full: whether samples that fill no step are left out. If not, ranks have equally many steps and samples all the
            same, because they wait for one another: the first samples come once more, fewer of them than ranks, and
            the last step is filled up with -1.
    """
    num_ranks = ranks.num_ranks
    count = num_steps(len(order), num_ranks, batch_size, full=full)
    places = count * num_ranks * batch_size
    if full or not len(order):
        taken = order[:places]
    else:
        taken = np.full(places, -1, dtype=np.int64)
        equal = -(-len(order) // num_ranks) * num_ranks
        taken[:equal] = np.resize(order, equal)
    return taken.reshape(count, batch_size, ranks.ranks_per_node, ranks.num_nodes).transpose(3, 2, 0, 1)
