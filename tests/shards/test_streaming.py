import gc
import multiprocessing
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from deadline import within
from shards.mds import WARNINGS, damage, write_mds

from ddm_lightning.shards.streaming import SafeStreamingDataset, SafeStreamingLoader, open_streams
from ddm_lightning.shards.verify import ShardError

from streaming import StreamingDataset  # isort: skip (after the shim)
from streaming.base.dataset import _ShardState  # isort: skip
from streaming.base.storage.download import LocalDownloader  # isort: skip

pytestmark = WARNINGS
NUM_SAMPLES = 100


@pytest.fixture
def folder(tmp_path):
    write_mds(tmp_path / "shards", range(NUM_SAMPLES))
    assert len(list((tmp_path / "shards").glob("*.mds"))) == 6
    return tmp_path / "shards"


def open_folder(folder, *, remote=None, shuffle=True, batch_size=8, seed=3):
    return open_streams([(remote, folder)], batch_size=batch_size, shuffle=shuffle, seed=seed, is_local_leader=True)


def loader_of(dataset, num_workers):
    return SafeStreamingLoader(dataset, num_workers=num_workers, persistent_workers=num_workers > 0)


def lists(batches):
    return [batch["sample_id"].tolist() for batch in batches]


def batches(dataset, num_workers):
    return lists(loader_of(dataset, num_workers))


def flat(nested):
    return [item for batch in nested for item in batch]


def test_every_sample_exactly_once_whatever_the_workers_in_turn_on_one_instance(folder):
    dataset = open_folder(folder)
    epochs = []
    with within(60):
        for num_workers in (0, 2, 0, 2):
            epochs.append(flat(batches(dataset, num_workers)))
    for epoch in epochs:
        assert sorted(epoch) == list(range(NUM_SAMPLES))
    assert len({tuple(epoch) for epoch in epochs}) == 4  # each epoch has an order of its own


def test_the_order_depends_on_the_seed_and_not_on_the_workers(folder):
    with within(60):
        serial, parallel, other = (
            batches(open_folder(folder, seed=seed), num_workers) for num_workers, seed in ((0, 3), (2, 3), (0, 4))
        )
    assert serial == parallel
    assert serial != other


def test_without_shuffling_every_epoch_is_in_the_shards_order(folder):
    dataset = open_folder(folder, shuffle=False)
    assert flat(batches(dataset, 0)) == flat(batches(dataset, 0)) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_a_damaged_remote_shard_raises_within_seconds(folder, tmp_path, kind, num_workers):
    name = damage(folder, kind)
    dataset = open_folder(tmp_path / "cache", remote=str(folder))
    with within(20), pytest.raises(ShardError) as caught:
        batches(dataset, num_workers)
    line = str(caught.value)
    assert line.startswith("a shard cannot be read: ")
    assert name in line
    assert "\n" not in line


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["missing", "truncated"])
def test_a_damaged_local_shard_raises_within_seconds(folder, kind, num_workers):
    name = damage(folder, kind)
    with within(20), pytest.raises(ShardError, match=name):
        batches(open_folder(folder), num_workers)


def test_the_workers_end_with_the_error(folder):
    damage(folder, "missing")
    loader = loader_of(open_folder(folder), 2)
    with within(20), pytest.raises(ShardError) as caught:
        list(loader)
    assert caught.tb is not None  # and with it everything that the error's frames hold
    assert not multiprocessing.active_children()


def test_every_worker_stops_where_one_failed(folder, tmp_path):
    """The worker that did not fail has its batch asked for first, and waits for the shard at which the other failed."""
    damage(folder, "missing")
    for attempt in range(3):
        dataset = open_folder(tmp_path / f"cache-{attempt}", remote=str(folder), seed=attempt)
        with within(20), pytest.raises(ShardError, match="No such file"):
            batches(dataset, 2)


def test_what_failed_stays_failed(folder):
    name = damage(folder, "missing")
    dataset = open_folder(folder)
    for num_workers in (0, 0, 2):
        with within(20), pytest.raises(ShardError, match=name):
            batches(dataset, num_workers)


def test_one_sample_has_its_caption_too(folder):
    dataset = open_folder(folder)
    for number in (0, 99):
        assert dataset[number]["caption"] == f"number {number}"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_length_is_that_of_an_epoch_in_batches(folder, num_workers):
    for full, expected in ((False, 13), (True, 12)):
        dataset = open_streams([(None, folder)], batch_size=8, shuffle=True, seed=0, is_local_leader=True, full=full)
        loader = loader_of(dataset, num_workers)
        assert len(loader) == len(dataset) == len(lists(loader)) == expected


def test_a_shard_is_fetched_once_however_many_workers_want_it(folder, tmp_path, monkeypatch):
    fetched = tmp_path / "fetched"
    download = LocalDownloader._download_file_impl

    def note(self, remote, local, timeout):
        with fetched.open("a") as stream:
            stream.write(f"{Path(local).name}\n")
        time.sleep(0.01)
        download(self, remote, local, timeout)

    monkeypatch.setattr(LocalDownloader, "_download_file_impl", note)
    dataset = open_folder(tmp_path / "cache", remote=str(folder))
    with within(60):
        for num_workers in (2, 0):
            assert sorted(flat(batches(dataset, num_workers))) == list(range(NUM_SAMPLES))
    names = fetched.read_text().split()
    assert sorted(names) == sorted({path.name for path in folder.glob("*.mds")} | {"index.json.tmp"})


def test_an_abandoned_epoch_fetches_no_more(folder, tmp_path, monkeypatch):
    download = LocalDownloader._download_file_impl
    monkeypatch.setattr(LocalDownloader, "_download_file_impl", lambda *call: (time.sleep(0.05), download(*call))[1])
    dataset = open_folder(tmp_path / "cache", remote=str(folder), shuffle=False)
    iterator = iter(dataset)
    next(iterator)
    iterator.close()
    time.sleep(0.1)
    here = len(list((tmp_path / "cache").glob("*.mds")))
    time.sleep(0.3)
    assert len(list((tmp_path / "cache").glob("*.mds"))) == here < 6


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_seen", [1, 5])
def test_resuming_gives_exactly_what_was_left(folder, num_workers, num_seen):
    loader = loader_of(open_folder(folder), num_workers)
    with within(60):
        first = lists(loader)
        iterator = iter(loader)
        seen = lists(next(iterator) for _ in range(num_seen))
        state = loader.state_dict()
        rest = lists(iterator)
        third = lists(loader)

        again = loader_of(open_folder(folder), num_workers)
        again.load_state_dict(state)
        assert lists(again) == rest
        assert lists(again) == third
    assert sorted(flat(seen + rest)) == list(range(NUM_SAMPLES))
    assert first != seen + rest


def test_a_resumed_run_opens_no_more_files_however_long_it_runs(folder):
    loader = loader_of(open_folder(folder), 0)
    lists(loader)
    loader.load_state_dict(loader.state_dict())

    def num_open():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    lists(loader)
    before = num_open()
    for _ in range(5):
        lists(loader)
        loader.state_dict()
    assert num_open() == before


def _open_at_once(folder, gate, results):
    gate.wait()
    try:
        results.put(sorted(flat(batches(open_folder(folder), 0))) == list(range(NUM_SAMPLES)))
    except BaseException as error:  # noqa: BLE001
        results.put(repr(error))


def test_processes_that_open_shards_at_the_same_moment_do_not_collide(folder):
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(12), context.Queue()
    children = [context.Process(target=_open_at_once, args=(folder, gate, results)) for _ in range(12)]
    for child in children:
        child.start()
    with within(60):
        assert [results.get() for _ in children] == [True] * len(children)
        for child in children:
            child.join()


def _wait_for_ever(folder):
    dataset = open_folder(folder)
    dataset._shard_states[3] = _ShardState.PREPARING  # by a process that was killed
    (folder / "shard.00003.mds").unlink()
    batches(dataset, 2)


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_workers_that_wait_end_with_their_parent(folder):
    process = multiprocessing.get_context("fork").Process(target=_wait_for_ever, args=(folder,))
    process.start()
    with within(30):
        while len(workers := _children(process.pid)) < 2:
            time.sleep(0.05)
        time.sleep(1)
        assert process.is_alive()
        process.kill()
        process.join()
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            time.sleep(0.05)


def test_the_private_names_that_it_leans_on_exist(folder, tmp_path):
    assert version("mosaicml-streaming").startswith("0.13.")
    assert {state.name for state in _ShardState} >= {"REMOTE", "PREPARING", "LOCAL"}
    for name in ("prepare_shard", "get_item", "_resume", "_get_work", "__iter__", "__len__"):
        assert name in vars(SafeStreamingDataset)
        assert name in vars(StreamingDataset), f"{name} is overridden, but is gone from the base"
    dataset = open_folder(tmp_path / "cache", remote=str(folder))
    plain = StreamingDataset(local=str(folder), batch_size=8)
    iterator = iter(plain)
    next(iterator)
    for name in ("_cache_filelock", "_event"):
        assert name in plain.__dict__, name
    assert "lock" in plain._shared_barrier.__dict__
    assert not plain._event.is_set()
    assert callable(dataset.streams[0]._downloader.clean_up)
    assert dataset._shard_states[0] == _ShardState.REMOTE
    assert isinstance(dataset._shm_prefix_int, int)
    assert list(Path("/dev/shm").glob(f"{dataset.shared_memory_number:06}_locals"))
    dataset.prepare_shard(0)
    assert dataset._shard_states[0] == _ShardState.LOCAL
