"""The order of training on images of several shapes: an endless sequence of batches of one shape each.

Each shape has an endless stream of its samples: a permutation per pass, one after the other. Its batch k holds the
samples kB to (k + 1)B - 1 of the stream, where B is the number of samples of a batch. A batch belongs to the pass in
which its last sample comes, so that pass e of a shape with n samples has the batches floor(e n / B) to
floor((e + 1) n / B) - 1. The batches of all shapes in a pass are shuffled.

So no sample is dropped: what fills no batch is carried into the next pass, and a shape of fewer than B samples fills a
batch over several passes. After any number of batches, the samples of one shape have been seen equally often to within
one. After E passes each of n >= B samples was seen E or E - 1 times; of n < B, up to ceil(B / n) times less than E,
until the next batch makes up for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ddm_lightning.shards.mds import Ids
from ddm_lightning.shards.mosaic import shuffled


def mixed_order(sizes: Sequence[Sequence[int]], batch_size: int, seed: int, first: int, stop: int) -> Iterator[Ids]:
    """Yield the samples of the batches ``first`` to ``stop`` - 1, those of one pass at a time.

    Args:
        sizes: samples of the shards of each shape. A sample is its position in the concatenated shards.
        batch_size: samples of a batch, over all ranks.
        seed: seed of all passes.
        first: number of a batch since the first pass.
        stop: likewise.
    """
    num_samples = np.array([sum(part) for part in sizes])
    first_samples = num_samples.cumsum() - num_samples
    end = 0
    for current in itertools.count():
        begin = end
        if begin >= stop:
            return

        # Batches of each shape before this pass, and in it.
        done = current * num_samples // batch_size
        counts = (current + 1) * num_samples // batch_size - done
        end += counts.sum()
        if end <= first:
            continue

        shapes = np.random.default_rng((seed, current)).permutation(np.arange(len(sizes)).repeat(counts))
        batches = np.empty((len(shapes), batch_size), np.int64)
        for shape in np.unique(shapes):
            # The first of these samples may still be of an earlier pass.
            oldest, skipped = divmod(done[shape] * batch_size, num_samples[shape])
            passes = [shuffled(sizes[shape], seed, one) for one in range(oldest, current + 1)]
            stream = np.concatenate(passes)[skipped:][: counts[shape] * batch_size]
            batches[shapes == shape] = first_samples[shape] + stream.reshape(-1, batch_size)

        yield batches[max(0, first - begin) : stop - begin].ravel()
