import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
from deadline import within
from fsspec.implementations.local import LocalFileSystem
from shards.mds import WARNINGS, damage, write_mds

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
    write_mds(tmp_path / "shards", range(NUM_SAMPLES))
    assert len(list((tmp_path / "shards").glob("*.mds"))) == 6
    return tmp_path / "shards"


def loader_of(folder, cache, num_workers, **settings):
    shards = FetchedShards([Origin(f"file://{folder}", cache)])
    settings = {"batch_size": 5, "seed": 3, "training": True, **settings}
    return ShardLoader(shards, num_workers=num_workers, **settings)


def ids(batches):
    return [i for batch in batches for i in batch["sample_id"].tolist()]


def test_shards_are_fetched_in_the_order_of_first_need(folder, tmp_path, monkeypatch):
    loader, asked, get = loader_of(folder, tmp_path / "cache", 0, batch_size=1), [], remote.download
    monkeypatch.setattr(ahead, "_NUM_THREADS", 1)
    monkeypatch.setattr(remote, "download", lambda url, path: (asked.append(url.rpartition("/")[2]), get(url, path)))
    order = shuffled(loader.shards.sizes, 3, 0)
    assert sorted(ids(loader)) == list(range(NUM_SAMPLES))
    assert asked == list(
        dict.fromkeys(loader.shards.files[shard].path.name for shard in loader.shards.shards_of(order))
    )


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["missing", "flipped"])
def test_a_damaged_shard_raises_within_seconds_now_and_later(folder, tmp_path, monkeypatch, kind, num_workers):
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 0.0)
    name = damage(folder, kind)
    loader = loader_of(folder, tmp_path / "cache", num_workers)
    for _ in range(2):
        with (
            within(60),
            pytest.raises(ShardError, match=rf"^a shard cannot be read: .*{name}: ") as caught,
        ):
            list(loader)
        assert "\n" not in str(caught.value)


def test_a_store_that_sends_something_else_is_asked_again(folder, tmp_path, monkeypatch):
    loader, get, answers = loader_of(folder, tmp_path / "cache", 0), remote.download, []

    def answer(url, path):
        answers.append(url)
        if len(answers) < 4:
            path.write_text("<html>Log in</html>")
        else:
            get(url, path)

    monkeypatch.setattr(fetch, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(remote, "download", answer)
    assert len(list(loader)) > 0 and len(answers) > 4


def ended(threads):
    """Whether all threads but these end within seconds."""
    for thread in set(threading.enumerate()) - threads:
        thread.join(20)
    return set(threading.enumerate()) <= threads


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_interrupted_wait_for_a_store_ends_all_threads(folder, tmp_path, monkeypatch, num_workers):
    """As by Ctrl-C: an exception comes while the first batch waits for a store that is down, for ten minutes."""
    loader, threads = loader_of(folder, tmp_path / "cache", num_workers), set(threading.enumerate())

    def fail(url, path):
        raise ConnectionError(f"{url}: down")

    monkeypatch.setattr(remote, "download", fail)
    with pytest.raises(TimeoutError), within(1):
        next(iter(loader))
    assert ended(threads)


def test_a_batch_that_is_begun_after_the_end_of_an_epoch_does_not_wait_for_ever(folder, tmp_path):
    """As a thread of the loader may do, between an error and the end of the threads."""
    shards = loader_of(folder, tmp_path / "cache", 0).shards
    with shards.reading(np.arange(NUM_SAMPLES), 5):
        pass
    with within(20), pytest.raises(CancelledError):
        shards.take(np.arange(5))


def test_an_error_ends_all_threads(folder, tmp_path):
    damage(folder, "missing")
    loader, threads = loader_of(folder, tmp_path / "cache", 2), set(threading.enumerate())
    with within(60), pytest.raises(ShardError):
        list(loader)
    assert ended(threads)


def test_a_shard_is_fetched_once_however_many_workers_need_it(folder, tmp_path, monkeypatch):
    fetched = tmp_path / "fetched"
    download = LocalFileSystem.get_file

    def note(self, remote, local):
        with fetched.open("a") as stream:
            stream.write(f"{Path(remote).name}\n")
        time.sleep(0.01)
        download(self, remote, local)

    monkeypatch.setattr(LocalFileSystem, "get_file", note)
    with within(60):
        for num_workers in (2, 0):
            assert sorted(ids(loader_of(folder, tmp_path / "cache", num_workers))) == list(range(NUM_SAMPLES))
    assert sorted(fetched.read_text().split()) == sorted(path.name for path in folder.glob("shard.*"))


def test_an_abandoned_epoch_fetches_no_more(folder, tmp_path, monkeypatch):
    """The second shard is under way when the epoch is left, so it arrives, and no other does."""
    download, threads = LocalFileSystem.get_file, set(threading.enumerate())
    under_way, left = threading.Event(), threading.Event()

    def wait(self, remote, local):
        if "00001" in remote:
            under_way.set()
            assert left.wait(60)
        download(self, remote, local)

    monkeypatch.setattr(ahead, "_NUM_THREADS", 1)
    monkeypatch.setattr(LocalFileSystem, "get_file", wait)
    iterator = iter(loader_of(folder, tmp_path / "cache", 0, training=False))
    next(iterator)
    assert under_way.wait(60)
    iterator.close()
    left.set()
    assert ended(threads)
    assert len(list((tmp_path / "cache").glob("*.mds"))) == 2


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_shards_in_folders_of_their_own(tmp_path, compression):
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
        loader = loader_of(merged, tmp_path / "cache", 2)
        assert sorted(ids(loader)) == list(range(NUM_SAMPLES))
        assert len(list((tmp_path / "cache").rglob("*.mds"))) == len(loader.shards.files)
