"""Finished shards to real servers on this machine: S3's protocol (moto), SFTP (asyncssh), and a mounted folder."""

import shutil
from contextlib import contextmanager

import pytest
from prepare.listed import hashes
from shards import servers
from shards.mds import WARNINGS, write_mds

from ddm_lightning.core import remote as core_remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.shards.upload import upload_shards

pytestmark = [*WARNINGS, pytest.mark.slow]
SPLITS = ("cluster-0/held-out", "cluster-0/train", "cluster-1/train")


@contextmanager
def mounted(folder, tmp_path, monkeypatch):
    yield f"file://{folder}", None


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    for number, split in enumerate(SPLITS):
        write_mds(root / split, range(40 * number, 40 * number + 40))
    return root


@pytest.fixture(
    params=[
        "mounted",
        "s3",
        "sftp",
    ]
)
def remote(request, tmp_path, monkeypatch):
    folder = tmp_path / "remote"
    folder.mkdir()
    place = mounted if request.param == "mounted" else getattr(servers, request.param)
    with place(folder, tmp_path, monkeypatch) as (url, line):
        yield url, line


def fetched(url, tmp_path, names):
    """What lies at a URL, as Streaming reads it."""
    from streaming.base.storage.download import CloudDownloader

    copy = tmp_path / "fetched"
    shutil.rmtree(copy, ignore_errors=True)
    downloader = CloudDownloader.get(None if url.startswith("file://") else url)
    for name in names:
        downloader.download(f"{url.removeprefix('file://')}/{name}", str(copy / name), 20)
    downloader.clean_up()
    return hashes(copy)


@pytest.fixture
def puts(monkeypatch):
    """Names of the files that are uploaded, in order."""
    seen = []

    def watched(path, url, put=core_remote.put):
        seen.append("/".join(path.parts[-3:]))
        put(path, url)

    monkeypatch.setattr(core_remote, "put", watched)
    return seen


def test_every_file_arrives_and_a_second_upload_sends_nothing(shards, remote, tmp_path, puts):
    url, _ = remote
    ticks = []
    found = upload_shards(shards, url, lambda done, total: ticks.append((done, total)))
    assert found == hashes(shards) == fetched(url, tmp_path, found)
    assert sorted(puts) == sorted(found)
    for split in SPLITS:
        assert [name for name in puts if name.startswith(split)][-1] == f"{split}/index.json", "the index goes last"
    total = sum(path.stat().st_size for path in shards.rglob("*") if path.is_file())
    assert ticks[-1] == (total, total) and ticks == sorted(ticks)
    puts.clear()
    assert upload_shards(shards, url + "/", lambda *_: None) == found
    assert puts == []


def test_an_interrupted_upload_resumes_with_incomplete_folders(shards, remote, tmp_path, puts):
    url, _ = remote
    first = sum(path.stat().st_size for path in (shards / SPLITS[0]).iterdir())

    def stop(done, total):
        if done > first:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upload_shards(shards, url, stop)
    puts.clear()
    found = upload_shards(shards, url, lambda *_: None)
    assert found == fetched(url, tmp_path, found)
    assert {name.rpartition("/")[0] for name in puts} == set(SPLITS[1:])


def test_other_data_is_refused_and_kept(shards, remote, tmp_path, puts):
    url, _ = remote
    other = tmp_path / "other"
    write_mds(other / SPLITS[0], range(7))
    upload_shards(other, url, lambda *_: None)
    puts.clear()
    with pytest.raises(UserError, match=r"^key 'remote': \S+: holds other data \(cluster-0/held-out/index\.json\)"):
        upload_shards(shards, url, lambda *_: None)
    write_mds(other / "cluster-9/train", range(7))
    upload_shards(other, url, lambda *_: None)
    puts.clear()
    with pytest.raises(UserError, match=r"holds other data \(cluster-9/train/index\.json\)"):
        upload_shards(shards, url, lambda *_: None)
    assert puts == []
    assert fetched(url, tmp_path, hashes(other)) == hashes(other)


@pytest.mark.parametrize("times", [2, 3])
def test_a_damaged_file_is_sent_again_and_finally_refused(shards, tmp_path, monkeypatch, times):
    folder = tmp_path / "remote"
    left = {"cluster-1/train/shard.00001.mds": times}

    def damaging(path, url, put=core_remote.put):
        put(path, url)
        name = "/".join(path.parts[-3:])
        if left.get(name):
            left[name] -= 1
            (folder / name).write_bytes(b"\0" + (folder / name).read_bytes()[1:])

    monkeypatch.setattr(core_remote, "put", damaging)
    if times == 2:
        assert upload_shards(shards, f"file://{folder}", lambda *_: None) == hashes(folder)
        return
    with pytest.raises(UserError, match=r"shard\.00001\.mds arrived damaged 3 times"):
        upload_shards(shards, f"file://{folder}", lambda *_: None)
    assert not (folder / "cluster-1/train/index.json").exists(), "without an index nobody takes the folder for whole"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gopher://host/shards", "gopher"),
        ("sftp://nobody@127.0.0.1:9/shards", "127.0.0.1"),
        ("file:///proc/nowhere/shards", "nowhere"),
    ],
)
def test_an_unwritable_address_is_one_line(shards, url, words):
    with pytest.raises(OSError, match=url) as refusal:
        upload_shards(shards, url, lambda *_: None)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_broken_connection_is_one_line_and_the_upload_can_be_repeated(shards, remote, tmp_path):
    url, line = remote
    if line is None:
        return
    line.fail(0 if url.startswith("s3") else 3_000)
    with pytest.raises(OSError, match=f"^{url}"):
        upload_shards(shards, url, lambda *_: None)
    line.fail(0, times=0)
    found = upload_shards(shards, url, lambda *_: None)
    assert found == fetched(url, tmp_path, found)
