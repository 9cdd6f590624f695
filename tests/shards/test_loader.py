import numpy as np
import pytest
from shards.mds import write_mds

from ddm_lightning.shards.datamodule import ShardLoader, steps
from ddm_lightning.shards.mosaic import shuffled

from streaming import StreamingDataset  # isort: skip (after the shim)

SIZES = [17, 17, 17, 17, 17, 15]


def order_of(sizes=SIZES, *, seed=3, epoch=0, shuffle=True):
    return shuffled(sizes, seed, epoch) if shuffle else np.arange(sum(sizes))


def interleaved(order, *, num_ranks, batch_size, full):
    """What ``steps`` does, one sample after the other."""
    order = list(order)
    if full:
        order = order[: len(order) // (num_ranks * batch_size) * num_ranks * batch_size]
    else:
        while len(order) % num_ranks:
            order.append(order[len(order) % len(set(order))])
    table = {}
    for position, sample in enumerate(order):
        step, place = divmod(position, num_ranks * batch_size)
        table.setdefault((place % num_ranks, step), []).append(sample)
    return table


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch(shuffle):
    orders = [tuple(order_of(seed=s, epoch=e, shuffle=shuffle)) for s, e in ((3, 0), (3, 0), (3, 1), (4, 0))]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len(set(orders)) == (3 if shuffle else 1)


def test_the_order_matches_a_plain_streaming_dataset(tmp_path):
    folder = write_mds(tmp_path, range(100))
    plain = StreamingDataset(
        local=str(folder), batch_size=4, shuffle=True, shuffle_seed=3, num_canonical_nodes=1, shuffle_block_size=1 << 18
    )
    sizes = [len(shard) for shard in plain.shards]
    assert len(sizes) == 6
    for epoch in range(2):
        assert [sample["sample_id"] for sample in plain] == order_of(sizes, epoch=epoch).tolist()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 2, 6])
@pytest.mark.parametrize("num_samples", [0, 1, 5, 47, 48, 100])
def test_steps_against_a_loop(num_samples, num_ranks, full):
    order = np.random.default_rng(0).permutation(num_samples)
    expected = interleaved(order, num_ranks=num_ranks, batch_size=4, full=full)
    found = {}
    loader = ShardLoader(range(num_samples), batch_size=4, seed=0, training=full, num_ranks=num_ranks)
    for rank in range(num_ranks):
        table = steps(order, rank, num_ranks, 4, full=full)
        assert len(table) == len(loader)
        found |= {(rank, step): samples.tolist() for step, samples in enumerate(table)}
    assert found == expected
