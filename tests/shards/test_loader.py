import numpy as np
import pytest
from shards.mds import write_mds

from ddm_lightning.shards.datamodule import ShardLoader, steps
from ddm_lightning.shards.mosaic import shuffled

from streaming import StreamingDataset  # isort: skip (after the shim)


class OneShard:
    """As many samples, of one shape."""

    def __init__(self, num_samples):
        self.parts = [[num_samples]]

    def __len__(self):
        return self.parts[0][0]


def test_the_order_is_that_of_a_plain_streaming_dataset(tmp_path):
    folder = write_mds(tmp_path, range(100))
    plain = StreamingDataset(
        local=str(folder), batch_size=4, shuffle=True, shuffle_seed=3, num_canonical_nodes=1, shuffle_block_size=1 << 18
    )
    sizes = [len(shard) for shard in plain.shards]
    assert len(sizes) == 6
    orders = [shuffled(sizes, 3, epoch).tolist() for epoch in range(2)]

    for order in orders:
        assert [sample["sample_id"] for sample in plain] == order
        assert sorted(order) == [*range(100)]

    assert orders[0] != orders[1]
    assert shuffled(sizes, 4, 0).tolist() not in orders


def interleaved(order, num_ranks, batch_size, full):
    """What ``steps`` does, one sample after the other: (rank, step) -> samples."""
    order = list(order)
    if full:
        del order[len(order) // (num_ranks * batch_size) * num_ranks * batch_size :]
    else:
        distinct = len(order)
        while len(order) % num_ranks:
            order.append(order[len(order) % distinct])

    table = {}
    for position, sample in enumerate(order):
        step, place = divmod(position, num_ranks * batch_size)
        table.setdefault((place % num_ranks, step), []).append(sample)

    return table


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 6])
@pytest.mark.parametrize("num_samples", [0, 1, 5, 47, 48, 100])
def test_steps_against_a_loop(num_samples, num_ranks, full):
    order = np.random.default_rng(0).permutation(num_samples)
    loader = ShardLoader(OneShard(num_samples), batch_size=4, seed=0, training=full, num_ranks=num_ranks)
    found = {}
    for rank in range(num_ranks):
        table = steps(order, rank, num_ranks, 4, full=full)
        assert len(table) == len(loader)
        found |= {(rank, step): samples.tolist() for step, samples in enumerate(table)}

    assert found == interleaved(order, num_ranks, 4, full)
