import threading
from concurrent.futures import CancelledError
from itertools import count

import numpy as np
import pytest
from deadline import within
from shards.mds import WARNINGS, damage, flat, write_mds

from ddm_lightning.core import remote
from ddm_lightning.shards import ahead, fetch
from ddm_lightning.shards.ahead import FetchedShards
from ddm_lightning.shards.datamodule import ShardLoader
from ddm_lightning.shards.fetch import Origin
from ddm_lightning.shards.mosaic import merge_index, shuffled
from ddm_lightning.shards.verify import ShardError

from streaming.base.util import merge_index as merge_by_streaming  # isort: skip (after the shim)

pytestmark = WARNINGS
NUM_SAMPLES = 100


@pytest.fixture
def folder(tmp_path):
    """Of six shards."""
    return write_mds(tmp_path / "shards", range(NUM_SAMPLES))


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def fetch_by(monkeypatch):
    """Fetches shards by a function that gets the real one as well."""

    def replace(function):
        monkeypatch.setattr(remote, "download", lambda url, path, get=remote.download: function(get, url, path))

    return replace


def loader_of(folder, cache, num_workers, **settings):
    shards = FetchedShards([Origin(f"file://{folder}", cache)])
    settings = {"batch_size": 5, "seed": 3, "training": True, **settings}
    return ShardLoader(shards, num_workers=num_workers, **settings)


def test_shards_are_fetched_in_the_order_of_first_need(folder, cache, monkeypatch, fetch_by):
    asked = []

    def note(get, url, path):
        asked.append(url.rpartition("/")[2])
        get(url, path)

    fetch_by(note)
    monkeypatch.setattr(ahead, "_NUM_THREADS", 1)
    loader = loader_of(folder, cache, 0, batch_size=1)
    shards = loader.shards
    assert sorted(flat(loader)) == [*range(NUM_SAMPLES)]
    order = shards.shards_of(shuffled(shards.sizes, 3, 0))
    assert asked == [shards.shards[number].path.name for number in dict.fromkeys(order)]


def ended(threads):
    """Whether all threads but these end within seconds."""
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)

    return set(threading.enumerate()) <= threads


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["missing", "flipped"])
def test_a_damaged_shard_raises_within_seconds_now_and_later(folder, cache, monkeypatch, kind, num_workers):
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 0.0)
    name = damage(folder, kind)
    loader = loader_of(folder, cache, num_workers)
    threads = set(threading.enumerate())
    for _ in range(2):
        with within(60), pytest.raises(ShardError, match=rf"^a shard cannot be read: .*{name}: .*$"):
            list(loader)

    assert ended(threads)


def test_a_store_that_sends_something_else_is_asked_again(folder, cache, monkeypatch, fetch_by):
    answers = count(1)

    def answer(get, url, path):
        get(url, path)
        if next(answers) < 4:
            path.write_text("<html>Log in</html>")

    fetch_by(answer)
    monkeypatch.setattr(fetch, "_PAUSE_SECONDS", 0.0)
    assert len(flat(loader_of(folder, cache, 0))) == NUM_SAMPLES
    assert next(answers) == 10


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_interrupted_wait_for_a_store_ends_all_threads(folder, cache, fetch_by, num_workers):
    """As by Ctrl-C: an exception comes while the first batch waits for a store that is down, for ten minutes."""

    def fail(get, url, path):
        raise ConnectionError(f"{url}: down")

    fetch_by(fail)
    loader = loader_of(folder, cache, num_workers)
    threads = set(threading.enumerate())
    with pytest.raises(TimeoutError), within(0.3):
        next(iter(loader))

    assert ended(threads)


def test_a_batch_that_is_begun_after_the_end_of_an_epoch_does_not_wait_for_ever(folder, cache):
    """As a thread of the loader may do, between an error and the end of the threads."""
    shards = loader_of(folder, cache, 0).shards
    with shards.reading(np.arange(NUM_SAMPLES), 5):
        pass

    with within(20), pytest.raises(CancelledError):
        shards.take(np.arange(5))


def test_a_shard_is_fetched_once_however_many_workers_need_it(folder, cache, fetch_by):
    fetched = []

    def note(get, url, path):
        fetched.append(url.rpartition("/")[2])
        threading.Event().wait(0.01)
        get(url, path)

    fetch_by(note)
    for num_workers in (2, 0):
        with within(60):
            assert sorted(flat(loader_of(folder, cache, num_workers))) == [*range(NUM_SAMPLES)]

    assert sorted(fetched) == sorted(path.name for path in folder.glob("shard.*"))


def test_an_abandoned_epoch_fetches_no_more(folder, cache, monkeypatch, fetch_by):
    """The second shard is under way when the epoch is left, so it arrives, and no other does."""
    threads = set(threading.enumerate())
    under_way = threading.Event()
    left = threading.Event()

    def wait(get, url, path):
        if "00001" in url:
            under_way.set()
            assert left.wait(60)

        get(url, path)

    fetch_by(wait)
    monkeypatch.setattr(ahead, "_NUM_THREADS", 1)
    iterator = iter(loader_of(folder, cache, 0, training=False))
    next(iterator)
    assert under_way.wait(60)
    iterator.close()
    left.set()
    assert ended(threads)
    assert len(list(cache.glob("*.mds"))) == 2


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_shards_in_folders_of_their_own(tmp_path, cache, compression):
    """As Streaming merges the indices of several writers, but in folders of any name."""
    write_mds(tmp_path / "merged/a", range(40), compression=compression)
    write_mds(tmp_path / "merged/b", range(40, NUM_SAMPLES), compression=compression)
    merge_by_streaming(str(tmp_path / "merged"), keep_local=True)
    merged = (tmp_path / "merged").rename(tmp_path / "run #1?")
    expected = (merged / "index.json").read_bytes()
    (merged / "index.json").unlink()

    merge_index([merged / "a", merged / "b"], merged)
    assert (merged / "index.json").read_bytes() == expected
    for _ in range(2):  # fetched, then checked
        loader = loader_of(merged, cache, 2)
        assert sorted(flat(loader)) == [*range(NUM_SAMPLES)]
        assert len(list(cache.rglob("*.mds"))) == len(loader.shards.shards)
