"""The order of the samples: one permutation per epoch; each rank takes its part of every step.

It depends on the shards, the seed and the epoch alone. So a run that stopped on some number of ranks and workers
resumes exactly on any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from streaming.base.shuffle import get_shuffle

# Fewest samples among which a shard's samples are scattered: they are fetched before the first step of an epoch. Four
# times the largest shard is the lower limit, because a shard larger than a block mixes with no other.
_MIN_BLOCK = 1 << 18
_SHUFFLE = "py1e"


@dataclass(frozen=True)
class Ranks:
    """This rank among ``ranks_per_node`` on each of ``num_nodes``."""

    num_nodes: int = 1
    ranks_per_node: int = 1
    rank: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def rank_of_node(self) -> int:
        """Index of this rank on its node."""
        return self.rank % self.ranks_per_node


def epoch_order(shard_sizes: Sequence[int], *, seed: int, epoch: int, shuffle: bool) -> Int[np.ndarray, "n"]:
    """Return every sample once, by its position in the concatenated shards; shuffled with Streaming's ``py1e``."""
    if not shuffle:
        return np.arange(np.sum(shard_sizes), dtype=np.int64)
    sizes = np.asarray(shard_sizes, dtype=np.int64)
    # One canonical node: a permutation of all shards, whatever the number of nodes.
    return get_shuffle(_SHUFFLE, sizes, 1, seed, epoch, max(_MIN_BLOCK, 4 * int(sizes.max())))


def num_steps(num_samples: int, num_ranks: int, batch_size: int, *, full: bool) -> int:
    """Return the number of steps that ``steps`` makes of ``num_samples``."""
    if full:
        return num_samples // (num_ranks * batch_size)
    return math.ceil(math.ceil(num_samples / num_ranks) / batch_size)


def steps(
    order: Int[np.ndarray, "n"], ranks: Ranks, batch_size: int, *, full: bool
) -> Int[np.ndarray, "nodes ranks steps batch"]:
    """Assign samples to ranks and steps; step s takes the next ``num_ranks * batch_size`` samples of the order.

    Args:
        order: the rest of the epoch.
        ranks: number of nodes and ranks.
        batch_size: samples per rank and step.
        full: whether to skip samples that do not fill a step. Otherwise all ranks still get equally many samples,
            because they wait for one another: the first samples are repeated, fewer of them than there are ranks, and
            the last step is padded with -1.
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
