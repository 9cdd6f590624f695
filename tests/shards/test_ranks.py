import itertools

import pytest
from shards.mds import WARNINGS, write_mds
from shards.ranks import data_module, on_ranks

pytestmark = WARNINGS
BATCH, NUM_SAMPLES, STOP_AFTER = 12, 103, 3
FULL = NUM_SAMPLES // BATCH * BATCH


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    write_mds(root / "cluster-0/train", range(50))
    write_mds(root / "cluster-1/train", range(100, 100 + NUM_SAMPLES - 50), cluster=1)
    write_mds(root / "cluster-0/held-out", range(200, 207))
    return root


def settings_of(shards, cache, place, num_workers):
    return {
        "shards": shards if place == "folder" else f"file://{shards}",
        "clusters": [0, 1],
        "batch_size": BATCH,
        "seed": 5,
        "cache": cache,
        "num_workers": num_workers,
        "held_out_clusters": [0],
    }


def ids(batches):
    return [batch["sample_id"].tolist() for batch in batches]


def two_epochs(rank, num_ranks, settings):
    """The first epoch; the second as far as the stop, its state, its rest; the third."""
    loader = data_module(rank, num_ranks, settings).train_dataloader()
    first = ids(loader)
    iterator = iter(loader)
    seen = ids(itertools.islice(iterator, STOP_AFTER))
    state = loader.state_dict()
    return first, seen, state, ids(iterator), ids(loader)


def resumed(rank, num_ranks, settings, state):
    """What a later start gives: the rest of the epoch, and the one after it."""
    loader = data_module(rank, num_ranks, settings).train_dataloader()
    loader.load_state_dict(state)
    return ids(loader), ids(loader)


def held_out(rank, num_ranks, settings):
    return ids(data_module(rank, num_ranks, settings).val_dataloader())


def by_step(per_rank):
    """Samples of each step over all ranks, sorted; ranks have equally many steps."""
    assert len({len(batches) for batches in per_rank}) == 1
    return [sorted(i for batch in step for i in batch) for step in zip(*per_rank, strict=True)]


def run_on(num_ranks, function, tmp_path, shards, place, num_workers, *more):
    cache = tmp_path / f"cache-{len(list(tmp_path.glob('cache-*')))}"
    cache.mkdir()
    return on_ranks(num_ranks, tmp_path, function, settings_of(shards, cache, place, num_workers), *more)


@pytest.mark.parametrize(("place", "num_workers"), [("folder", 2), ("URL", 0)])
def test_two_ranks_share_the_cluster_and_any_number_of_them_goes_on(shards, tmp_path, place, num_workers):
    everything = {*range(50), *range(100, 100 + NUM_SAMPLES - 50)}
    answers = run_on(2, two_epochs, tmp_path, shards, place, num_workers)
    first, seen, states, rest, third = ([answer[part] for answer in answers] for part in range(5))
    for epoch in (first, [s + r for s, r in zip(seen, rest, strict=True)], third):
        assert all(len(batch) == BATCH // 2 for rank in epoch for batch in rank)
        flat = [i for step in by_step(epoch) for i in step]
        assert len(flat) == len(set(flat)) == FULL  # no overlap, and no sample twice
        assert set(flat) <= everything
    assert {i for epoch in (first, seen, rest, third) for rank in epoch for batch in rank for i in batch} == everything
    assert states[0] == states[1]

    for num_ranks in (2, 1):  # the rest is exactly the rest, step by step
        again = run_on(num_ranks, resumed, tmp_path, shards, place, (num_workers + 1) % 3, states[0])
        assert by_step([answer[0] for answer in again]) == by_step(rest)
        assert by_step([answer[1] for answer in again]) == by_step(third)
        if num_ranks == 2:
            assert [answer[0] for answer in again] == rest


@pytest.mark.parametrize("place", ["folder", "URL"])
def test_ranks_validate_equally_many_batches_and_leave_no_sample_out(shards, tmp_path, place):
    answers = run_on(2, held_out, tmp_path, shards, place, 0)
    assert [[len(batch) for batch in rank] for rank in answers] == [[4], [4]]
    assert {i for rank in answers for batch in rank for i in batch} == set(range(200, 207))
