import multiprocessing
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from deadline import no_process_left, within
from fsspec.implementations.local import LocalFileSystem
from shards.mds import WARNINGS, damage, write_mds

from ddm_lightning.core import remote
from ddm_lightning.shards import fetch
from ddm_lightning.shards.datamodule import ShardLoader
from ddm_lightning.shards.fetch import FetchedShards, Origin
from ddm_lightning.shards.verify import ShardError

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


def test_missing_shards_are_listed_in_the_order_of_first_need(folder, tmp_path):
    shards = FetchedShards([Origin(f"file://{folder}", tmp_path / "cache")])
    starts = np.cumsum([0, *shards.sizes[:-1]])
    need = starts[[4, 0, 4, 2]] + 1
    assert shards.missing(need) == [4, 0, 2]
    shards.fetch(0)
    assert shards.missing(need) == [4, 2]


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
    loader, get, answers = loader_of(folder, tmp_path / "cache", 0), remote.get, []

    def answer(url, path):
        answers.append(url)
        if len(answers) < 4:
            path.write_text("<html>Log in</html>")
        else:
            get(url, path)

    monkeypatch.setattr(fetch, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(remote, "get", answer)
    assert len(list(loader)) > 0 and len(answers) > 4


def test_an_error_ends_all_workers(folder, tmp_path):
    damage(folder, "missing")
    loader = loader_of(folder, tmp_path / "cache", 2)
    with no_process_left(), within(60), pytest.raises(ShardError) as caught:
        list(loader)
    assert caught.tb is not None  # and with it everything that the error's frames hold


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
    assert sorted(fetched.read_text().split()) == sorted(path.name for path in folder.iterdir())


def test_an_abandoned_epoch_fetches_no_more(folder, tmp_path, monkeypatch):
    """The second shard is under way when the epoch is left, so it arrives, and no other does."""
    download, threads = LocalFileSystem.get_file, set(threading.enumerate())
    under_way, left = threading.Event(), threading.Event()

    def wait(self, remote, local):
        if "00001" in remote:
            under_way.set()
            assert left.wait(60)
        download(self, remote, local)

    monkeypatch.setattr(LocalFileSystem, "get_file", wait)
    iterator = iter(loader_of(folder, tmp_path / "cache", 0, training=False))
    next(iterator)
    assert under_way.wait(60)
    iterator.close()
    left.set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
    assert len(list((tmp_path / "cache").glob("*.mds"))) == 2


def _wait_for_ever(folder, cache):
    LocalFileSystem.get_file = lambda *_: time.sleep(3600)
    list(loader_of(folder, cache, 2))


def _children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_waiting_workers_end_with_their_parent(folder, tmp_path):
    loader_of(folder, tmp_path / "cache", 0)  # fetches the index
    process = multiprocessing.get_context("fork").Process(target=_wait_for_ever, args=(folder, tmp_path / "cache"))
    process.start()
    with within(120):
        while len(workers := _children(process.pid)) < 2:
            time.sleep(0.05)
        time.sleep(1)
        assert process.is_alive()
        process.kill()
        process.join()
        while any(Path(f"/proc/{worker}").exists() for worker in workers):
            time.sleep(0.05)
