"""Shards behind real servers on this machine: S3's protocol (moto) and SFTP (asyncssh)."""

import time
from threading import Thread

import pytest
from deadline import within
from shards import servers
from shards.mds import WARNINGS, write_mds
from shards.ranks import data_module, on_ranks

from ddm_lightning.shards import fetch
from ddm_lightning.shards.verify import ShardError

pytestmark = [*WARNINGS, pytest.mark.slow]
NUM_SAMPLES = 800


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    write_mds(root / "cluster-0/train", range(NUM_SAMPLES), shard_bytes=1 << 15)
    assert len(list(root.rglob("*.mds"))) == 3
    return root


@pytest.fixture(params=["s3", "sftp"])
def remote(request, shards, tmp_path, monkeypatch):
    with getattr(servers, request.param)(shards, tmp_path, monkeypatch) as found:
        yield found


def settings_of(url, tmp_path, num_workers):
    cache = tmp_path / "cache"
    cache.mkdir()
    return {"shards": url, "clusters": [0], "batch_size": 16, "seed": 1, "cache": cache, "num_workers": num_workers}


def wait_until(condition):
    while not condition():
        time.sleep(0.05)


def two_epochs(rank, num_ranks, settings):
    loader = data_module(rank, num_ranks, settings).train_dataloader()
    return [[i for batch in loader for i in batch["sample_id"].tolist()] for _ in range(2)]


def test_two_ranks_of_two_workers(remote, tmp_path):
    url, _ = remote
    answers = on_ranks(2, tmp_path, two_epochs, settings_of(url, tmp_path, 2))
    for first, second in zip(*answers, strict=True):
        assert sorted(first + second) == list(range(NUM_SAMPLES))


def test_a_connection_that_is_cut_in_mid_read_is_made_again(remote, tmp_path):
    url, line = remote
    loader = data_module(0, 1, settings_of(url, tmp_path, 2)).train_dataloader()
    line.fail(20_000, times=1)
    with within(40):
        found = [i for batch in loader for i in batch["sample_id"].tolist()]
    assert line.num_failed == 1
    assert sorted(found) == list(range(NUM_SAMPLES))


def test_a_store_that_is_down_for_a_while_is_waited_for(remote, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(fetch, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(fetch, "note", said.append)
    url, line = remote
    loader = data_module(0, 1, settings_of(url, tmp_path, 0)).train_dataloader()
    line.fail(20_000)
    back = Thread(target=lambda: (wait_until(lambda: said), line.fail(0, times=0)))
    back.start()
    with within(80):
        found = [i for batch in loader for i in batch["sample_id"].tolist()]
    back.join()
    assert sorted(found) == list(range(NUM_SAMPLES))
    assert [line.rpartition("; ")[2] for line in said] == ["waits up to 10 minutes"]


def test_a_connection_that_is_always_cut_ends_with_one_clear_line(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 0.0)
    url, line = remote
    loader = data_module(0, 1, settings_of(url, tmp_path, 2)).train_dataloader()
    line.fail(20_000)
    start = time.monotonic()
    with within(80), pytest.raises(ShardError, match=r"^a shard cannot be read: .*shard\.0000\d\.mds: \S.*") as caught:
        list(loader)
    assert f"read: {url}/cluster-0/train/shard" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert line.num_failed >= 3
    assert time.monotonic() - start < 60


def test_a_server_that_falls_silent_is_given_up(remote, tmp_path, monkeypatch):
    monkeypatch.setattr("ddm_lightning.core.remote.SILENT_SECONDS", 0.5)
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 0.0)
    url, line = remote
    loader = data_module(0, 1, settings_of(url, tmp_path, 2)).train_dataloader()
    line.fail(20_000, silent=True)
    with within(80), pytest.raises(ShardError, match=r"a shard cannot be read: .*([Tt]imed? ?out|silent for 0\.5 s)"):
        list(loader)


def test_a_folder_that_is_not_there(remote, tmp_path):
    url, _ = remote
    with within(40), pytest.raises(ShardError, match=r"elsewhere/cluster-0/train: shards cannot be opened: .*island"):
        data_module(0, 1, settings_of(f"{url}/elsewhere", tmp_path, 0)).train_dataloader()
