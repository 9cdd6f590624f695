"""Ranks of one node in threads, each with a data module of its own."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from deadline import within
from shards.mds import WARNINGS, ids, module_of, write_mds

pytestmark = WARNINGS
BATCH = 12
STOP_AFTER = 3
TRAIN = [*range(50), *range(100, 153)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    write_mds(root / "cluster-0/train", TRAIN[:50])
    write_mds(root / "cluster-1/train", TRAIN[50:], cluster=1)
    write_mds(root / "cluster-0/held-out", range(200, 207))
    return root


def on_ranks(num_ranks, function, shards, cache, **settings):
    """What ``function`` gives for the data module of each rank."""
    settings = {"batch_size": BATCH, "clusters": [0, 1], "held_out_clusters": [0], **settings}
    cache.mkdir()
    ranks = [module_of(shards, cache, rank, num_ranks, **settings) for rank in range(num_ranks)]
    with within(60), ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(function, ranks))


def two_epochs(data):
    """The first epoch; the second as far as the stop, its state, its rest; the third."""
    loader = data.train_dataloader()
    first = ids(loader)
    iterator = iter(loader)
    seen = ids(itertools.islice(iterator, STOP_AFTER))
    state = loader.state_dict()
    return first, seen, state, ids(iterator), ids(loader)


def resumed(state, data):
    """What a later start gives: the rest of the epoch, and the one after it."""
    loader = data.train_dataloader()
    loader.load_state_dict(state)
    return ids(loader), ids(loader)


def by_step(ranks):
    """Samples of each step over all ranks, sorted; ranks have equally many steps."""
    return [sorted(itertools.chain(*step)) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("place", "num_workers"), [("", 2), ("file://", 0)], ids=["folder", "URL"])
def test_two_ranks_share_the_cluster_and_any_number_of_them_goes_on(shards, tmp_path, place, num_workers):
    address = f"{place}{shards}"
    answers = on_ranks(2, two_epochs, address, tmp_path / "cache", num_workers=num_workers)
    first, seen, states, rest, third = zip(*answers, strict=True)

    for epoch in (by_step(first), by_step(seen) + by_step(rest), by_step(third)):
        assert [len(step) for step in epoch] == [BATCH] * 8
        samples = [*itertools.chain(*epoch)]
        assert len(set(samples)) == len(samples)
        assert set(samples) <= {*TRAIN}

    assert {len(batch) for rank in first for batch in rank} == {BATCH // 2}
    assert {*itertools.chain(*by_step(first), *by_step(seen), *by_step(rest), *by_step(third))} == {*TRAIN}
    assert states[0] == states[1]

    for num_ranks in (2, 1):
        cache = tmp_path / f"cache-of-{num_ranks}"
        again = on_ranks(num_ranks, partial(resumed, states[0]), address, cache, num_workers=2 - num_workers)
        rest_again, third_again = zip(*again, strict=True)
        assert by_step(rest_again) == by_step(rest)
        assert by_step(third_again) == by_step(third)
        if num_ranks == 2:
            assert rest_again == rest


def test_ranks_validate_equally_many_batches_and_leave_no_sample_out(shards, tmp_path):
    answers = on_ranks(2, lambda data: ids(data.val_dataloader()), f"file://{shards}", tmp_path / "cache")

    assert [[len(batch) for batch in rank] for rank in answers] == [[4], [4]]
    assert {i for rank in answers for i in rank[0]} == {*range(200, 207)}
