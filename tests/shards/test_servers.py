"""Shards behind real servers on this machine: S3's protocol (moto) and SFTP (asyncssh)."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from deadline import within
from shards import servers
from shards.mds import WARNINGS, flat, module_of, write_mds

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
    monkeypatch.setattr("time.sleep", lambda _: None)  # between the attempts at a transfer
    with getattr(servers, request.param)(shards, tmp_path, monkeypatch) as found:
        yield found


def loader_of(url, tmp_path, num_workers=2, rank=0, num_ranks=1):
    cache = tmp_path / "cache"
    cache.mkdir(exist_ok=True)
    return module_of(url, cache, rank, num_ranks, batch_size=16, num_workers=num_workers).train_dataloader()


def all_ids(loader):
    with within(80):
        return sorted(flat(loader))


def test_two_ranks_of_two_workers(remote, tmp_path):
    url, _ = remote
    loaders = [loader_of(url, tmp_path, rank=rank, num_ranks=2) for rank in range(2)]
    with within(80), ThreadPoolExecutor(2) as threads:
        first, second = threads.map(flat, loaders)

    assert sorted(first + second) == [*range(NUM_SAMPLES)]


def test_a_connection_that_is_cut_in_mid_read_is_made_again(remote, tmp_path):
    url, line = remote
    loader = loader_of(url, tmp_path)
    line.fail(20_000, times=1)

    assert all_ids(loader) == [*range(NUM_SAMPLES)]
    assert line.num_failed == 1


def test_a_store_that_is_down_for_a_while_is_waited_for(remote, tmp_path, monkeypatch):
    said = []
    url, line = remote

    def repair(message):
        said.append(message.rpartition("; ")[2])
        line.fail(0, times=0)

    monkeypatch.setattr(fetch, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(fetch, "note", repair)
    loader = loader_of(url, tmp_path, num_workers=0)
    line.fail(20_000)

    assert all_ids(loader) == [*range(NUM_SAMPLES)]
    assert said == ["waits up to 10 minutes"]


def test_a_connection_that_is_always_cut_ends_with_one_clear_line(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 0.0)
    url, line = remote
    loader = loader_of(url, tmp_path)
    line.fail(20_000)

    shard = rf"{url}/cluster-0/train/shard\.0000\d\.mds"
    with pytest.raises(ShardError, match=rf"^a shard cannot be read: {shard}: \S.*$"):
        all_ids(loader)

    assert line.num_failed >= 3


def test_a_server_that_falls_silent_is_given_up(remote, tmp_path, monkeypatch):
    monkeypatch.setattr("ddm_lightning.core.remote.SILENT_SECONDS", 0.5)
    monkeypatch.setattr(fetch, "PATIENCE_SECONDS", 0.0)
    url, line = remote
    loader = loader_of(url, tmp_path)
    line.fail(20_000, silent=True)

    with pytest.raises(ShardError, match=r"a shard cannot be read: .*([Tt]imed? ?out|silent for 0\.5 s)"):
        all_ids(loader)


def test_a_folder_that_is_not_there(remote, tmp_path):
    url, _ = remote
    with within(40), pytest.raises(ShardError, match=r"elsewhere/cluster-0/train: shards cannot be opened: .*island"):
        loader_of(f"{url}/elsewhere", tmp_path)
